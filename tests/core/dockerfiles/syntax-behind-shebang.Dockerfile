#!/bin/x
#SYNTAX = evil/frontend:1
FROM scratch
