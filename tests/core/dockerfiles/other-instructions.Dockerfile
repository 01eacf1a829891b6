FROM registry.invalid/base@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
MAINTAINER somebody
USER root
EXPOSE 80/tcp 443
SHELL ["/bin/sh", "-ec"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=1s CMD true
HEALTHCHECK NONE
WORKDIR /x
ENTRYPOINT ["/bin/sh"]
CMD exec "<<E" FROM evil:1
RUN ["/bin/sh", "-c", "echo <<E"]
RUN echo "a <<E b"
