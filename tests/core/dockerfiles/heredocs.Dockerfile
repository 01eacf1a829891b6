FROM registry.invalid/base@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
USER root
RUN <<FIRST cat > /one && <<-'SECOND' cat > /two
FROM evil:1
FIRST
	ADD https://evil.invalid/x /x
	SECOND
RUN <<"A B"
# VOLUME /x
true
A B
COPY <<ONE <<-TWO /files/
FROM evil:1
ONE
VOLUME /x
	TWO
ADD <<E /added
RUN --mount=type=secret,id=x true \
E
RUN 3<<E cat /dev/null
FROM evil:1
E
RUN test -f /files/ONE && test "$(cat /one)" = "FROM evil:1"
