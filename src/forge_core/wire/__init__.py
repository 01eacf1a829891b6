"""The words that both sides speak (wire.md): messages, codes, limits, the lease MAC."""
