// Package archvariant names the variant of amd64 that every such machine has.
package archvariant

// AMD64Variant is what GOAMD64 calls it.
func AMD64Variant() string { return "v1" }
