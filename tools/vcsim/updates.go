package main

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"time"
)

// The simulator answers WaitForUpdatesEx by reading every object of every
// filter again for each single change of anything, which makes a burst of N
// machines cost N². vCenter coalesces. So this door does: it reads what a
// collector's filters show once a tick, and sends what differs.

const tick = 50 * time.Millisecond

// collector is what one property collector was told to watch and has sent.
type collector struct {
	mu      sync.Mutex
	specs   []string
	sent    map[string]map[string]string // object as XML -> property -> value as XML
	version int
}

// updates holds the collectors of all sessions.
type updates struct {
	mu         sync.Mutex
	collectors map[string]*collector
}

// of is the collector of that key; nil: no filter was ever given to it.
func (u *updates) of(key string) *collector {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.collectors[key]
}

// forget drops a collector that is destroyed.
func (u *updates) forget(key string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.collectors, key)
}

// child returns the raw XML of the first element of that name, and its text.
func child(body []byte, name string) (raw, text string) {
	decoder := xml.NewDecoder(bytes.NewReader(body))
	for {
		start := decoder.InputOffset()
		token, err := decoder.Token()
		if err != nil {
			return "", ""
		}
		if element, ok := token.(xml.StartElement); ok && element.Name.Local == name {
			inner := decoder.InputOffset()
			if decoder.Skip() != nil {
				return "", ""
			}
			end := decoder.InputOffset()
			whole := string(body[start:end])
			return whole, string(body[inner : int64(start)+int64(strings.LastIndex(whole, "</"))])
		}
	}
}

// key names a collector: ids repeat from session to session.
func key(r *http.Request, body []byte) string {
	_, id := child(body, "_this")
	if cookie, err := r.Cookie("vmware_soap_session"); err == nil {
		return cookie.Value + "/" + id
	}
	return id
}

// noteFilter remembers what a collector is told to watch.
func (u *updates) noteFilter(r *http.Request, body []byte) {
	raw, _ := child(body, "spec")
	raw = strings.Replace(raw, "<spec>", "<specSet>", 1)
	raw = raw[:strings.LastIndex(raw, "</")] + "</specSet>"
	id := key(r, body)
	u.mu.Lock()
	c := u.collectors[id]
	if c == nil {
		c = &collector{sent: map[string]map[string]string{}}
		u.collectors[id] = c
	}
	u.mu.Unlock()
	c.mu.Lock()
	c.specs = append(c.specs, raw)
	c.mu.Unlock()
}

// wait answers WaitForUpdatesEx. A session takes its collectors along when it ends: whoever waits then is told so, and
// whoever asks for one of them in another session asks for an object that is not there.
func (u *updates) wait(next http.Handler, w http.ResponseWriter, r *http.Request, body []byte, ended func() bool) {
	if _, err := r.Cookie("vmware_soap_session"); err != nil {
		next.ServeHTTP(w, r)
		return
	}
	c := u.of(key(r, body))
	if c == nil {
		this, _ := child(body, "_this")
		this = strings.ReplaceAll(this, "_this", "obj")
		fault(w, "ManagedObjectNotFound", this)
		return
	}
	_, version := child(body, "version")
	_, longest := child(body, "maxWaitSeconds")
	var seconds int
	if _, err := fmt.Sscan(longest, &seconds); err != nil {
		seconds = 1800
	}
	end := time.Now().Add(time.Duration(seconds) * time.Second)
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		if ended() {
			fault(w, "NotAuthenticated", "")
			return
		}
		now, status, answer := c.read(next, r)
		if status != http.StatusOK {
			w.WriteHeader(status)
			_, _ = w.Write(answer)
			return
		}
		set := c.differences(now)
		if set != "" || version == "" {
			c.version++
			respond(w, fmt.Sprintf("<returnval><version>%d</version><filterSet><filter type=\"PropertyFilter\">f</filter>%s</filterSet></returnval>", c.version, set))
			return
		}
		if time.Now().After(end) {
			respond(w, "")
			return
		}
		select {
		case <-r.Context().Done():
			return
		case <-time.After(tick):
		}
	}
}

func respond(w http.ResponseWriter, inner string) {
	w.Header().Set("Content-Type", "text/xml; charset=utf-8")
	fmt.Fprintf(w, `<?xml version="1.0" encoding="UTF-8"?><soapenv:Envelope xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xmlns:xsd="http://www.w3.org/2001/XMLSchema"><soapenv:Body><WaitForUpdatesExResponse xmlns="urn:vim25">%s</WaitForUpdatesExResponse></soapenv:Body></soapenv:Envelope>`, inner)
}

// read asks the simulator for everything that the filters show.
func (c *collector) read(next http.Handler, r *http.Request) (map[string]map[string]string, int, []byte) {
	now := map[string]map[string]string{}
	for _, spec := range c.specs {
		request := `<?xml version="1.0" encoding="UTF-8"?><soapenv:Envelope xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xmlns:xsd="http://www.w3.org/2001/XMLSchema"><soapenv:Body><RetrievePropertiesEx xmlns="urn:vim25"><_this type="PropertyCollector">propertyCollector</_this>` + spec + `<options/></RetrievePropertiesEx></soapenv:Body></soapenv:Envelope>`
		again := r.Clone(r.Context())
		again.Body = io.NopCloser(strings.NewReader(request))
		recorder := httptest.NewRecorder()
		next.ServeHTTP(recorder, again)
		if recorder.Code != http.StatusOK {
			return nil, recorder.Code, recorder.Body.Bytes()
		}
		parse(recorder.Body.Bytes(), now)
	}
	return now, http.StatusOK, nil
}

// parse takes objects and their properties out of an answer, as raw XML.
func parse(body []byte, into map[string]map[string]string) {
	decoder := xml.NewDecoder(bytes.NewReader(body))
	var object, name string
	for {
		start := decoder.InputOffset()
		token, err := decoder.Token()
		if err != nil {
			return
		}
		element, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		inner := decoder.InputOffset()
		switch element.Name.Local {
		case "obj", "name", "val":
			if decoder.Skip() != nil {
				return
			}
			raw := string(body[start:decoder.InputOffset()])
			switch element.Name.Local {
			case "obj":
				object = raw
				into[object] = map[string]string{}
			case "name":
				name = string(body[inner : int64(start)+int64(strings.LastIndex(raw, "</"))])
			case "val":
				into[object][name] = raw
			}
		}
	}
}

// differences says what is new, changed and gone since the last time, as XML.
func (c *collector) differences(now map[string]map[string]string) string {
	var out strings.Builder
	for object, properties := range now {
		before, known := c.sent[object]
		kind, changes := "enter", ""
		if known {
			kind = "modify"
		}
		for name, value := range properties {
			if before[name] != value {
				changes += "<changeSet><name>" + name + "</name><op>assign</op>" + value + "</changeSet>"
			}
		}
		for name := range before {
			if _, still := properties[name]; !still {
				changes += "<changeSet><name>" + name + "</name><op>remove</op></changeSet>"
			}
		}
		if changes != "" || !known {
			fmt.Fprintf(&out, "<objectSet><kind>%s</kind>%s%s</objectSet>", kind, object, changes)
		}
	}
	for object := range c.sent {
		if _, still := now[object]; !still {
			fmt.Fprintf(&out, "<objectSet><kind>leave</kind>%s</objectSet>", object)
		}
	}
	c.sent = now
	return out.String()
}
