FROM registry.invalid/base@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
LABEL maintainer Somebody
LABEL "org.example.with space"="a b" dev.forgery=1 other='dev.forge.x=1'
LABEL dev.for\
gery2=x
RUN true
