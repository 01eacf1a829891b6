# check=skip=all
# syntax=evil/frontend:1
FROM scratch
