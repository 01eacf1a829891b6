FROM registry.invalid/base@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa AS one
ENV FILE=a UNUSED=$UNKNOWN
FROM one
ENV FILE=dir/b OLD=$FILE
ADD $OLD /x
ADD "${FILE}" /y
RUN test "$OLD" = a && test -f /x && test -f /y
