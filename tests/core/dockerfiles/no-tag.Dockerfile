FROM evil
RUN true
