FROM registry.invalid/base@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
ENV NAME=a.tar.gz EMPTY=
RUN f=a.txt; s=.txt; test "${f%.txt}-${f#*.}-${#f}-${NAME%%.*}-${f%$s}-${NAME%"${s#.t}"}" = a-txt-5-a-a-a.tar.gz
RUN : "${EMPTY:-${f%.txt}}" ${f/\./x} 2>/dev/null || true
COPY <<'E' /script
echo ${NAME%}
E
RUN <<E
true
echo ${NAME#}
E
CMD echo ${NAME%}
