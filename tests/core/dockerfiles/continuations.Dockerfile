FROM \
   registry.invalid/base@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
RUN true \
# FROM evil:1
    # VOLUME /x

  && true \  
  && tr\
ue
ru\
n true
RUN echo \\
RUN echo '# FROM evil:1 \
# FROM evil:1
  '
