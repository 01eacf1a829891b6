ARG REPOSITORY=registry.invalid/base DIGEST="sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
ARG NAME=${REPOSITORY##*/}
ARG EMPTY=
ARG UNSET
FROM ${REPOSITORY%%$NAME}$NAME@$DIGEST
FROM ${EMPTY:-$REPOSITORY}@${UNSET:-$DIGEST}
FROM ${REPOSITORY/wrong*/right}@${EMPTY:+wrong}${NAME:+"$DIGEST"}
FROM ${REPOSITORY}@${DIGEST/sha?56:/'sha256:'}
RUN true
