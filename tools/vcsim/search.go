package main

import (
	"log"
	"time"

	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25/soap"
	"github.com/vmware/govmomi/vim25/types"
)

// The simulator panics when it is searched while a machine is being made: the
// machine is in its folder before it has a name and a configuration. The panic
// ends that call alone, but the lock of the index is never released, and every
// later search waits for it for ever. So searches hold no lock of the index,
// and one that panics is made again.

const (
	searchTries = 200
	searchPause = 5 * time.Millisecond
)

// searchIndex replaces the simulator's. With Lock and Unlock of its own it opts
// out of the simulator's locks.
type searchIndex struct {
	simulator.SearchIndex
}

func (*searchIndex) Lock()   {}
func (*searchIndex) Unlock() {}

func (s *searchIndex) FindByInventoryPath(ctx *simulator.Context, req *types.FindByInventoryPath) soap.HasFault {
	return again(func() soap.HasFault { return s.SearchIndex.FindByInventoryPath(ctx, req) })
}

func (s *searchIndex) FindAllByUuid(ctx *simulator.Context, req *types.FindAllByUuid) soap.HasFault {
	return again(func() soap.HasFault { return s.SearchIndex.FindAllByUuid(ctx, req) })
}

// again makes a search until it does not panic.
func again(search func() soap.HasFault) soap.HasFault {
	for try := 1; try < searchTries; try++ {
		if result := attempt(search); result != nil {
			return result
		}
		time.Sleep(searchPause)
	}
	return search()
}

// attempt makes a search; nil: it panicked.
func attempt(search func() soap.HasFault) (result soap.HasFault) {
	defer func() {
		if reason := recover(); reason != nil {
			result = nil
		}
	}()
	return search()
}

// searchSafely puts the index in the place of the simulator's.
func searchSafely(registry *simulator.Registry) {
	ref := types.ManagedObjectReference{Type: "SearchIndex", Value: "SearchIndex"}
	index, ok := registry.Get(ref).(*simulator.SearchIndex)
	if !ok {
		log.Fatal("the simulator has no SearchIndex")
	}
	registry.Put(&searchIndex{SearchIndex: *index})
}
