// Package packageurl writes package URLs well enough for a record that nobody asks for.
package packageurl

import "errors"

// The types that BuildKit uses.
const (
	TypeDocker = "docker"
	TypeOCI    = "oci"
)

// Qualifier is one key and its value.
type Qualifier struct{ Key, Value string }

// Qualifiers are a list of them.
type Qualifiers []Qualifier

// PackageURL is one, taken apart.
type PackageURL struct {
	Type, Namespace, Name, Version string
	Qualifiers                     Qualifiers
	Subpath                        string
}

// NewPackageURL puts one together.
func NewPackageURL(kind, namespace, name, version string, qualifiers Qualifiers, subpath string) *PackageURL {
	return &PackageURL{kind, namespace, name, version, qualifiers, subpath}
}

// ToString leaves qualifiers out.
func (p *PackageURL) ToString() string {
	return "pkg:" + p.Type + "/" + p.Namespace + "/" + p.Name + "@" + p.Version
}

// FromString fails.
func FromString(string) (PackageURL, error) {
	return PackageURL{}, errors.New("package URLs are not read by this build")
}
