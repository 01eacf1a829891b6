FROM registry.invalid/base@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa AS first
USER root
RUN echo 1 > /one
FROM registry.invalid/base@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
RUN --mount=type=bind,source=a,target=/a --mount=from=FIRST,src=/one,dst=/one,rw --mount=type=tmpfs,target=/scratch,size=1m --network=none cat /a /one
RUN --mount=from=registry.invalid/other@sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb,target=/other --network=default test -d /other/usr
