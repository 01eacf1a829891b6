# Escape = `
FROM registry.invalid/base@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
RUN echo `
  ADD https://evil.invalid/x /x `
  # VOLUME /x
  && true
ENV X=a` b Y="c`"d"
COPY ["a", "/d e"]
RUN test -f '/d e' && test "$X" = 'a b' && test "$Y" = 'c"d'
