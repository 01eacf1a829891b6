# escape=\
FROM registry.invalid/base@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
RUN true \
  && true
RUN <<E
# VOLUME /x
E
