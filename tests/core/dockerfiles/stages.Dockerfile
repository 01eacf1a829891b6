FROM registry.invalid/base@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa AS Build
USER root
RUN echo one > /one
FROM build AS final
COPY --from=0 /one /again
COPY --from=BUILD /one /third
COPY --from=+0 /one /fourth
FROM scratch
COPY --from=final /again /
COPY --from=scratch / /
