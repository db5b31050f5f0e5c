// A client over oras-go for tests.
module coracle.dev/tools/oras

go 1.26.0

require (
	github.com/opencontainers/image-spec v1.1.1
	oras.land/oras-go/v2 v2.6.0
)

require (
	github.com/opencontainers/go-digest v1.0.0 // indirect
	golang.org/x/sync v0.14.0 // indirect
)
