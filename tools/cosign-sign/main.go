// Program cosign-sign signs an image of a registry by sigstore's libraries, with a new key, and stores the signature where
// cosign does (sigstore/cosign, specs/SIGNATURE_SPEC.md). It prints the public key.
//
//	cosign-sign HOST/REPOSITORY@DIGEST [USER PASSWORD]
package main

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"os"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/sigstore/sigstore/pkg/cryptoutils"
	"github.com/sigstore/sigstore/pkg/signature"
	"github.com/sigstore/sigstore/pkg/signature/payload"
)

const payloadType = "application/vnd.dev.cosign.simplesigning.v1+json"

// sign returns a signature of the image as a layer, and the public key.
func sign(image name.Digest) (mutate.Addendum, []byte, error) {
	var none mutate.Addendum
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return none, nil, err
	}
	signer, err := signature.LoadSigner(key, crypto.SHA256)
	if err != nil {
		return none, nil, err
	}
	signed, err := payload.Cosign{Image: image}.MarshalJSON()
	if err != nil {
		return none, nil, err
	}
	made, err := signer.SignMessage(bytes.NewReader(signed))
	if err != nil {
		return none, nil, err
	}
	public, err := cryptoutils.MarshalPublicKeyToPEM(key.Public())
	annotations := map[string]string{"dev.cosignproject.cosign/signature": base64.StdEncoding.EncodeToString(made)}
	layer := static.NewLayer(signed, types.MediaType(payloadType))
	return mutate.Addendum{Layer: layer, Annotations: annotations}, public, err
}

func run(args []string) error {
	image, err := name.NewDigest(args[0], name.Insecure)
	if err != nil {
		return err
	}
	auth := authn.Anonymous
	if len(args) == 3 {
		auth = &authn.Basic{Username: args[1], Password: args[2]}
	}
	added, public, err := sign(image)
	if err != nil {
		return err
	}
	tag := image.Repository.Tag(strings.ReplaceAll(image.DigestStr(), ":", "-") + ".sig")
	var signatures v1.Image = mutate.MediaType(empty.Image, types.OCIManifestSchema1)
	if before, err := remote.Image(tag, remote.WithAuth(auth)); err == nil {
		signatures = before
	}
	if signatures, err = mutate.Append(signatures, added); err != nil {
		return err
	}
	if err := remote.Write(tag, signatures, remote.WithAuth(auth)); err != nil {
		return err
	}
	_, err = os.Stdout.Write(public)
	return err
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "cosign-sign:", err)
		os.Exit(1)
	}
}
