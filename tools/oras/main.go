// Command oras is a small client over the oras-go library, for tests: it copies
// between a registry and an OCI layout, lists, and deletes.
//
//	oras push  LAYOUT TAG REPOSITORY:TAG
//	oras pull  REPOSITORY:TAG LAYOUT
//	oras tags  REPOSITORY
//	oras refs  REPOSITORY@DIGEST
//	oras rm    REPOSITORY@DIGEST
//
// The registry speaks plain HTTP; the token is in ORAS_TOKEN.
package main

import (
	"context"
	"fmt"
	"os"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"oras.land/oras-go/v2"
	"oras.land/oras-go/v2/content/oci"
	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"
)

func repository(name string) (*remote.Repository, error) {
	repo, err := remote.NewRepository(name)
	if err != nil {
		return nil, err
	}
	repo.PlainHTTP = true
	client := &auth.Client{Cache: auth.NewCache()}
	if token := os.Getenv("ORAS_TOKEN"); token != "" {
		credential := auth.Credential{Username: "token", Password: token}
		client.Credential = auth.StaticCredential(repo.Reference.Registry, credential)
	}
	repo.Client = client
	return repo, nil
}

func run(ctx context.Context, args []string) error {
	if len(args) < 2 {
		return fmt.Errorf("usage: oras push|pull|tags|refs|rm ARGUMENTS")
	}
	target := args[1]
	if args[0] == "push" {
		target = args[len(args)-1]
	}
	repo, err := repository(target)
	if err != nil {
		return err
	}
	reference := repo.Reference.Reference
	switch args[0] {
	case "push":
		store, err := oci.New(args[1])
		if err != nil {
			return err
		}
		_, err = oras.Copy(ctx, store, args[2], repo, reference, oras.DefaultCopyOptions)
		return err
	case "pull":
		store, err := oci.New(args[2])
		if err != nil {
			return err
		}
		_, err = oras.Copy(ctx, repo, reference, store, reference, oras.DefaultCopyOptions)
		return err
	case "tags":
		return repo.Tags(ctx, "", func(tags []string) error {
			for _, tag := range tags {
				fmt.Println(tag)
			}
			return nil
		})
	}
	descriptor, err := repo.Resolve(ctx, reference)
	if err != nil {
		return err
	}
	switch args[0] {
	case "refs":
		return repo.Referrers(ctx, descriptor, "", func(found []ocispec.Descriptor) error {
			for _, one := range found {
				fmt.Println(one.Digest, one.ArtifactType)
			}
			return nil
		})
	case "rm":
		return repo.Delete(ctx, descriptor)
	}
	return fmt.Errorf("no command %q", args[0])
}

func main() {
	if err := run(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "oras:", err)
		os.Exit(1)
	}
}
