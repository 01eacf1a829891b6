FROM evil@sha256:abc
