// Command vcsim is a vCenter for tests: the simulator of govmomi behind a door
// that counts calls at the server's side and fails them on request.
//
//	vcsim -l 127.0.0.1:0 -ds 4 -pod-ds 3
//
// prints one line of JSON ({"url": …, "thumbprint": …, "control": …}) and serves
// until its standard input closes, so it never outlives the test that started it.
//
// The control port speaks plain HTTP:
//
//	GET  /calls    method -> calls since the last reset
//	POST /reset    forgets the counts
//	POST /fault    the list of rules from now on (see type rule)
//	POST /expire   every session that exists ends
package main

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"

	"github.com/vmware/govmomi/find"
	"github.com/vmware/govmomi/object"
	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25"
	"github.com/vmware/govmomi/vim25/types"

	_ "github.com/vmware/govmomi/vapi/simulator"
)

func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	model := simulator.VPX()
	listen := flag.String("l", "127.0.0.1:0", "address to listen on")
	user := flag.String("username", "", "the only user that may log in; empty: anyone")
	password := flag.String("password", "", "the user's password")
	delays := flag.String("method-delay", "", "Name:ms,… for calls (CreateVM_Task) and tasks (CreateVm)")
	podStores := flag.Int("pod-ds", 0, "so many datastores, from the last, go into the first pod")
	flag.IntVar(&model.Datacenter, "dc", 1, "datacenters")
	flag.IntVar(&model.Cluster, "cluster", 1, "clusters")
	flag.IntVar(&model.ClusterHost, "host", 2, "hosts of a cluster")
	flag.IntVar(&model.Host, "standalone-host", 0, "hosts outside clusters")
	flag.IntVar(&model.Pool, "pool", 0, "resource pools of a cluster")
	flag.IntVar(&model.Datastore, "ds", 4, "datastores")
	flag.IntVar(&model.Pod, "pod", 1, "storage pods")
	flag.IntVar(&model.Machine, "vm", 0, "virtual machines of a pool")
	flag.IntVar(&model.DelayConfig.Delay, "delay", 0, "milliseconds before every call")
	flag.Parse()

	methods, err := parseDelays(*delays)
	if err != nil {
		return err
	}
	model.DelayConfig.MethodDelay = methods
	// A slow task must not keep the property collector from its objects.
	simulator.TaskDelay.MethodDelay = map[string]int{"LockHandoff": 0}
	for name, ms := range methods {
		simulator.TaskDelay.MethodDelay[name] = ms
	}
	if err := model.Create(); err != nil {
		return fmt.Errorf("make the inventory: %w", err)
	}
	defer model.Remove()
	searchSafely(model.Map())
	model.Service.TLS = new(tls.Config)
	model.Service.RegisterEndpoints = true
	model.Service.Listen = &url.URL{Host: *listen}
	if *user != "" {
		model.Service.Listen.User = url.UserPassword(*user, *password)
	}
	server := model.Service.NewServer()
	defer server.Close()
	if err := fillPod(model, *podStores); err != nil {
		return fmt.Errorf("fill the pod: %w", err)
	}
	door := newDoor(server.Server.Config.Handler)
	server.Server.Config.Handler = door

	control, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	go func() { log.Print(http.Serve(control, http.HandlerFunc(door.control))) }()

	thumbprint := sha256.Sum256(server.Certificate().Raw)
	line, err := json.Marshal(map[string]string{
		"url":        fmt.Sprintf("https://%s/sdk", server.URL.Host),
		"thumbprint": hex.EncodeToString(thumbprint[:]),
		"control":    control.Addr().String(),
	})
	if err != nil {
		return err
	}
	fmt.Println(string(line))
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

func parseDelays(text string) (map[string]int, error) {
	delays := map[string]int{}
	for _, part := range strings.Split(text, ",") {
		if part == "" {
			continue
		}
		name, ms, ok := strings.Cut(part, ":")
		value, err := strconv.Atoi(ms)
		if !ok || err != nil {
			return nil, fmt.Errorf("method delay %q is not Name:milliseconds", part)
		}
		delays[name] = value
	}
	return delays, nil
}

// fillPod moves the last n datastores into the first pod and turns its placement on.
func fillPod(model *simulator.Model, n int) error {
	if n == 0 {
		return nil
	}
	ctx := context.Background()
	client, err := vim25.NewClient(ctx, model.Service)
	if err != nil {
		return err
	}
	finder := find.NewFinder(client)
	dc, err := finder.DefaultDatacenter(ctx)
	if err != nil {
		return err
	}
	finder.SetDatacenter(dc)
	pod, err := finder.DatastoreCluster(ctx, "DC0_POD0")
	if err != nil {
		return err
	}
	var stores []types.ManagedObjectReference
	for i := model.Datastore - n; i < model.Datastore; i++ {
		store, err := finder.Datastore(ctx, fmt.Sprintf("LocalDS_%d", i))
		if err != nil {
			return err
		}
		stores = append(stores, store.Reference())
	}
	task, err := pod.MoveInto(ctx, stores)
	if err != nil {
		return err
	}
	if err := task.Wait(ctx); err != nil {
		return err
	}
	on := true
	spec := types.StorageDrsConfigSpec{PodConfigSpec: &types.StorageDrsPodConfigSpec{Enabled: &on}}
	task, err = object.NewStorageResourceManager(client).ConfigureStorageDrsForPod(ctx, pod, spec, true)
	if err != nil {
		return err
	}
	return task.Wait(ctx)
}
