ARG VERSION=1.0
FROM registry.invalid/base@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
ARG VERSION
ENV DIRECTORY=dir
ADD app-$VERSION.txt $DIRECTORY/b ./x.git /to/
ADD ["a", "/json a"]
ADD --chown=0:0 dir/../a /b
RUN test -f /to/app-1.0.txt && test -f /to/b && test -f "/json a" && test -f /to/f
