package main

import (
	"context"
	"testing"
	"time"

	"github.com/vmware/govmomi"
	"github.com/vmware/govmomi/object"
	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25"
	"github.com/vmware/govmomi/vim25/soap"
)

// A machine without a name and a configuration stands for one that is being made.
// With the simulator's own index the first search panics and the second never ends.
func TestSearchBesideMachineThatIsBeingMade(t *testing.T) {
	model := simulator.VPX()
	if err := model.Create(); err != nil {
		t.Fatal(err)
	}
	searchSafely(model.Map())
	// Not closed: that would wait for calls that never end.
	server := model.Service.NewServer()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	vm := model.Map().Any("VirtualMachine").(*simulator.VirtualMachine)
	name, config := vm.Name, vm.Config
	vm.Name, vm.Config = "", nil
	time.AfterFunc(300*time.Millisecond, func() { vm.Name, vm.Config = name, config })
	for _, which := range []string{"beside it", "afterwards"} {
		found, err := search(ctx, t, server.URL.String(), name)
		if err != nil || found == nil {
			t.Fatalf("search %s: %v %v", which, found, err)
		}
	}
}

func search(ctx context.Context, t *testing.T, url, name string) (object.Reference, error) {
	t.Helper()
	client, err := login(ctx, url)
	if err != nil {
		return nil, err
	}
	return object.NewSearchIndex(client).FindByInventoryPath(ctx, "/DC0/vm/"+name)
}

func login(ctx context.Context, address string) (*vim25.Client, error) {
	u, err := soap.ParseURL(address)
	if err != nil {
		return nil, err
	}
	client, err := govmomi.NewClient(ctx, u, true)
	if err != nil {
		return nil, err
	}
	return client.Client, nil
}
