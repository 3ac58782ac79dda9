"""The version of Resolute, read by the build and by `determined.__version__`."""

VERSION = "0.1.0"
