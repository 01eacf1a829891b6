# FROM evil:1

