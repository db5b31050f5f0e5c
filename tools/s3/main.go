// An S3 server in memory for tests: gofakes3 with what it lacks, a check of the signatures (AWS Signature Version 4, in
// headers and in presigned URLs) and UploadPartCopy. Prints its address when it listens. Its one bucket is "registry",
// its one key "access" with the secret "secret".
package main

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"

	"bytes"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
)

const (
	access = "access"
	secret = "secret"
)

func sum(data []byte) string {
	digest := sha256.Sum256(data)
	return hex.EncodeToString(digest[:])
}

func mac(key []byte, text string) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(text))
	return h.Sum(nil)
}

// valid says whether the request is signed with the key, its body included where its headers have the signature.
func valid(r *http.Request, body []byte) bool {
	query := r.URL.Query()
	if signature := query.Get("X-Amz-Signature"); signature != "" {
		query.Del("X-Amz-Signature")
		// A presigned request signs every header of S3 that it has.
		for name := range r.Header {
			name = strings.ToLower(name)
			if strings.HasPrefix(name, "x-amz-") && !strings.Contains(query.Get("X-Amz-SignedHeaders"), name) {
				return false
			}
		}
		return signature == sign(r, query, query.Get("X-Amz-Credential"), query.Get("X-Amz-SignedHeaders"), query.Get("X-Amz-Date"), "UNSIGNED-PAYLOAD")
	}
	fields := map[string]string{}
	rest, ok := strings.CutPrefix(r.Header.Get("Authorization"), "AWS4-HMAC-SHA256 ")
	if !ok {
		return false
	}
	for _, field := range strings.Split(rest, ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(field), "=")
		fields[name] = value
	}
	payload := r.Header.Get("X-Amz-Content-Sha256")
	if payload != "UNSIGNED-PAYLOAD" && payload != sum(body) {
		return false
	}
	want := sign(r, query, fields["Credential"], fields["SignedHeaders"], r.Header.Get("X-Amz-Date"), payload)
	return fields["Signature"] == want
}

// sign returns the signature that a request must have, or a word that is none.
func sign(r *http.Request, query url.Values, credential, signed, date, payload string) string {
	scope := strings.Split(credential, "/")
	if len(scope) != 5 || scope[0] != access {
		return "invalid"
	}
	headers := ""
	for _, name := range strings.Split(signed, ";") {
		value := r.Header.Get(name)
		if name == "host" {
			value = r.Host
		}
		headers += name + ":" + strings.TrimSpace(value) + "\n"
	}
	encoded := strings.ReplaceAll(query.Encode(), "+", "%20")
	request := strings.Join([]string{r.Method, r.URL.EscapedPath(), encoded, headers, signed, payload}, "\n")
	text := strings.Join([]string{"AWS4-HMAC-SHA256", date, strings.Join(scope[1:], "/"), sum([]byte(request))}, "\n")
	key := []byte("AWS4" + secret)
	for _, part := range scope[1:] {
		key = mac(key, part)
	}
	return hex.EncodeToString(mac(key, text))
}

// copyPart makes a part of an object that is there (UploadPartCopy, whole objects only).
func copyPart(inner http.Handler, w http.ResponseWriter, r *http.Request) {
	source := httptest.NewRecorder()
	inner.ServeHTTP(source, httptest.NewRequest(http.MethodGet, "/"+strings.TrimPrefix(r.Header.Get("X-Amz-Copy-Source"), "/"), nil))
	if source.Code != http.StatusOK {
		w.WriteHeader(source.Code)
		w.Write(source.Body.Bytes())
		return
	}
	put := httptest.NewRequest(http.MethodPut, r.URL.RequestURI(), source.Body)
	put.Header.Set("Content-Length", strconv.Itoa(source.Body.Len()))
	part := httptest.NewRecorder()
	inner.ServeHTTP(part, put)
	w.WriteHeader(part.Code)
	if part.Code != http.StatusOK {
		w.Write(part.Body.Bytes())
		return
	}
	tag := strings.ReplaceAll(part.Header().Get("ETag"), `"`, "&quot;")
	fmt.Fprintf(w, "<CopyPartResult><ETag>%s</ETag></CopyPartResult>", tag)
}

func main() {
	backend := s3mem.New()
	if err := backend.CreateBucket("registry"); err != nil {
		log.Fatal(err)
	}
	inner := gofakes3.New(backend, gofakes3.WithTimeSkewLimit(0), gofakes3.WithoutVersioning()).Server()
	outer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || !valid(r, body) {
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprint(w, "<Error><Code>SignatureDoesNotMatch</Code></Error>")
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		if r.Method == http.MethodPut && r.URL.Query().Has("partNumber") && r.Header.Get("X-Amz-Copy-Source") != "" {
			copyPart(inner, w, r)
			return
		}
		inner.ServeHTTP(w, r)
	})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(listener.Addr())
	log.Fatal(http.Serve(listener, outer))
}
