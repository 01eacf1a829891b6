// Package PACKAGE says that this remote cache is not there.
package PACKAGE

import (
	"context"
	"errors"

	"github.com/moby/buildkit/cache/remotecache"
	"github.com/moby/buildkit/session"
	ocispecs "github.com/opencontainers/image-spec/specs-go/v1"
)

var errAbsent = errors.New("the cache PACKAGE is not part of this build")

// ResolveCacheExporterFunc fails when it is used.
func ResolveCacheExporterFunc() remotecache.ResolveCacheExporterFunc {
	return func(context.Context, session.Group, map[string]string) (remotecache.Exporter, error) {
		return nil, errAbsent
	}
}

// ResolveCacheImporterFunc fails when it is used.
func ResolveCacheImporterFunc() remotecache.ResolveCacheImporterFunc {
	return func(context.Context, session.Group, map[string]string) (remotecache.Importer, ocispecs.Descriptor, error) {
		return nil, ocispecs.Descriptor{}, errAbsent
	}
}
