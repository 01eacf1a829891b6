// Package fuseoverlayfs says that this snapshotter is not there.
package fuseoverlayfs

import (
	"errors"

	"github.com/containerd/containerd/snapshots"
)

var errAbsent = errors.New("fuse-overlayfs is not part of this build")

// Supported never.
func Supported(string) error { return errAbsent }

// NewSnapshotter fails.
func NewSnapshotter(string) (snapshots.Snapshotter, error) { return nil, errAbsent }
