# syntax=evil/frontend:1
FROM scratch
