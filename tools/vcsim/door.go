package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"
)

// rule fails calls of one method, after Skip of them, Count times (0: always).
type rule struct {
	// Method is a SOAP method, or "PUT", "HEAD", "DELETE" for datastore files, or "*".
	Method string `json:"method"`
	Skip   int    `json:"skip"`
	Count  int    `json:"count"`
	// DelayMs passes before anything else.
	DelayMs int `json:"delay_ms"`
	// Do is "delay", "cut" (connection closed, nothing done), "cut-after" (done,
	// the answer lost), "status" or "fault".
	Do     string `json:"do"`
	Status int    `json:"status"`
	// Fault is a type of vim25, as "DuplicateName"; its XML children follow.
	Fault  string `json:"fault"`
	Detail string `json:"detail"`
}

// door stands before the simulator.
type door struct {
	next http.Handler

	mu      sync.Mutex
	calls   map[string]int
	rules   []*rule
	cookies map[string]bool
	expired map[string]bool
	updates updates
}

func newDoor(next http.Handler) *door {
	return &door{
		next: next, calls: map[string]int{}, cookies: map[string]bool{}, expired: map[string]bool{},
		updates: updates{collectors: map[string]*collector{}},
	}
}

func (d *door) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	method := r.Method
	var body []byte
	if strings.HasPrefix(r.URL.Path, "/sdk") && r.Method == http.MethodPost {
		var err error
		if body, err = io.ReadAll(r.Body); err != nil {
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		method = methodOf(body)
	} else if strings.HasPrefix(r.URL.Path, "/rest/") || strings.HasPrefix(r.URL.Path, "/api/") {
		method = r.Method + " " + r.URL.Path
	}
	hit := d.note(method, r)
	if hit == nil {
		d.serve(w, r, method, body)
		return
	}
	time.Sleep(time.Duration(hit.DelayMs) * time.Millisecond)
	switch hit.Do {
	case "delay":
		d.serve(w, r, method, body)
	case "cut-after":
		d.next.ServeHTTP(nowhere{header: http.Header{}}, r)
		cut(w)
	case "cut":
		cut(w)
	case "status":
		w.WriteHeader(hit.Status)
	case "fault":
		fault(w, hit.Fault, hit.Detail)
	}
}

// serve lets a call through; waits for updates are answered here.
func (d *door) serve(w http.ResponseWriter, r *http.Request, method string, body []byte) {
	switch method {
	case "WaitForUpdatesEx":
		d.updates.wait(d.next, w, r, body, func() bool { return d.hasEnded(r) })
		return
	case "CreateFilter":
		d.updates.noteFilter(r, body)
	case "DestroyPropertyCollector":
		d.updates.forget(key(r, body))
	}
	d.next.ServeHTTP(w, r)
}

// hasEnded says whether the session of a call that goes on has ended since.
func (d *door) hasEnded(r *http.Request) bool {
	cookie, err := r.Cookie("vmware_soap_session")
	d.mu.Lock()
	defer d.mu.Unlock()
	return err != nil || d.expired[cookie.Value]
}

// fault answers with a fault of that type.
func fault(w http.ResponseWriter, kind, detail string) {
	w.Header().Set("Content-Type", "text/xml; charset=utf-8")
	w.WriteHeader(http.StatusInternalServerError)
	fmt.Fprintf(w, faultText, kind, kind, detail, kind)
}

const faultText = `<?xml version="1.0" encoding="UTF-8"?>
<soapenv:Envelope xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance">
<soapenv:Body><soapenv:Fault><faultcode>ServerFaultCode</faultcode><faultstring></faultstring>
<detail><%sFault xmlns="urn:vim25" xsi:type="%s">%s</%sFault></detail></soapenv:Fault></soapenv:Body></soapenv:Envelope>`

// note counts the call and returns the rule that it meets.
func (d *door) note(method string, r *http.Request) *rule {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls[method]++
	if cookie, err := r.Cookie("vmware_soap_session"); err == nil {
		d.cookies[cookie.Value] = true
		if d.expired[cookie.Value] {
			r.Header.Del("Cookie")
		}
	}
	for i, rule := range d.rules {
		if rule.Method != method && rule.Method != "*" {
			continue
		}
		if rule.Skip > 0 {
			rule.Skip--
			continue
		}
		if rule.Count > 0 {
			if rule.Count--; rule.Count == 0 {
				d.rules = append(d.rules[:i:i], d.rules[i+1:]...)
			}
		}
		return rule
	}
	return nil
}

func (d *door) control(w http.ResponseWriter, r *http.Request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch strings.TrimPrefix(r.URL.Path, "/") {
	case "calls":
		_ = json.NewEncoder(w).Encode(d.calls)
	case "reset":
		d.calls = map[string]int{}
	case "expire":
		for cookie := range d.cookies {
			d.expired[cookie] = true
		}
	case "fault":
		var rules []*rule
		if err := json.NewDecoder(r.Body).Decode(&rules); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		d.rules = rules
	default:
		http.NotFound(w, r)
	}
}

// methodOf is the name of the first element of the SOAP body.
func methodOf(body []byte) string {
	decoder := xml.NewDecoder(bytes.NewReader(body))
	inBody := false
	for {
		token, err := decoder.Token()
		if err != nil {
			return "?"
		}
		start, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		if inBody {
			return start.Name.Local
		}
		inBody = start.Name.Local == "Body"
	}
}

// cut closes the client's connection without an answer.
func cut(w http.ResponseWriter) {
	if hijacker, ok := w.(http.Hijacker); ok {
		if conn, _, err := hijacker.Hijack(); err == nil {
			_ = conn.Close()
		}
	}
}

// nowhere takes an answer that nobody will read.
type nowhere struct{ header http.Header }

func (n nowhere) Header() http.Header         { return n.header }
func (n nowhere) Write(b []byte) (int, error) { return len(b), nil }
func (n nowhere) WriteHeader(int)             {}
