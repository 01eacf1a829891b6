FRO\
M evil:1
