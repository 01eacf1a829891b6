"""The words that both sides speak (protocol.md): messages, codes, limits, the lease MAC."""
