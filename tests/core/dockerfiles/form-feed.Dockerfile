FROMevil:1
