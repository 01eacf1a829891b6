/* Moves the clocks of one process, as a person or a suspend moves those of a host.
 *
 * Preloaded (ld.so(8), LD_PRELOAD), it answers for the three functions of the C library that read
 * the wall clock, and for CLOCK_BOOTTIME.  The two offsets, in seconds, are the first 16 bytes of the
 * file that STEPPED_CLOCK names; they are read anew each time, so that a test steps a clock while the
 * process runs.  CLOCK_MONOTONIC and the timers of the kernel stay as they are.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct offsets { int64_t wall_s, boot_s; };

static const struct offsets nothing;
static const volatile struct offsets *offsets = &nothing;

__attribute__((constructor)) static void map_offsets(void)
{
    const char *path = getenv("STEPPED_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        abort(); /* a test that steps nothing would prove nothing */
    void *mapped = mmap(NULL, sizeof nothing, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED)
        abort();
    offsets = mapped;
}

int clock_gettime(clockid_t id, struct timespec *now)
{
    int failed = (int)syscall(SYS_clock_gettime, id, now);
    if (failed)
        return failed;
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE || id == CLOCK_TAI)
        now->tv_sec += offsets->wall_s;
    else if (id == CLOCK_BOOTTIME)
        now->tv_sec += offsets->boot_s;
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now)
{
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now)
        *now = precise.tv_sec;
    return precise.tv_sec;
}
