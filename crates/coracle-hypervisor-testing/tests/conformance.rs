//! The fake driver and the dispatcher over several drivers pass the conformance suite.

use std::sync::Arc;

use coracle_hypervisor::{Driver, DriverError, Drivers, VmmConfig};
use coracle_hypervisor_testing::fake::{FakeDriver, FakeMachines, remote};
use coracle_hypervisor_testing::{conformance, sample_vmm_config};

fn vmm_config(driver: &str) -> VmmConfig {
    VmmConfig { driver: driver.to_owned(), ..sample_vmm_config("fake") }
}

#[tokio::test]
async fn fake_driver_conforms() {
    let machines = FakeMachines::new();
    conformance::check(|| FakeDriver::new(machines.clone()), &vmm_config("")).await;
    assert_eq!((machines.running(), machines.starts()), (0, 2));
    conformance::check_templates(&FakeDriver::new(machines.clone()), &vmm_config("")).await;
    conformance::check_snapshots(&FakeDriver::new(machines.clone()), &vmm_config("")).await;
    conformance::check_disks(&FakeDriver::new(machines.clone()), &vmm_config("")).await;
    assert_eq!(machines.running(), 0);
}

/// Guests in another process, for which this test uses another thread.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fake_driver_conforms_with_guests_in_another_process() {
    let (node, guests) = remote::pair().unwrap();
    let served = tokio::task::spawn_blocking(move || remote::serve(&guests));
    let machines = FakeMachines::with_guests_at(node).unwrap();
    conformance::check(|| FakeDriver::new(machines.clone()), &vmm_config("")).await;
    conformance::check_templates(&FakeDriver::new(machines.clone()), &vmm_config("")).await;
    conformance::check_disks(&FakeDriver::new(machines.clone()), &vmm_config("")).await;
    assert_eq!(machines.running(), 0);
    drop(machines);
    served.await.unwrap().unwrap();
}

#[tokio::test]
async fn drivers_dispatch_by_name_and_default_to_the_first() {
    let (ours, theirs) = (FakeMachines::new(), FakeMachines::new());
    let other = FakeDriver::named(theirs.clone(), "other");
    let drivers = Drivers::new(Arc::new(FakeDriver::new(ours.clone())), vec![Arc::new(other)]);
    let first = drivers.start(&vmm_config("")).await.unwrap();
    let second = drivers.start(&vmm_config("other")).await.unwrap();
    assert_eq!((ours.running(), theirs.running()), (1, 1));
    assert_eq!(drivers.find(&vmm_config("fake")).await.unwrap(), Some(first));
    assert_eq!(drivers.find(&vmm_config("other")).await.unwrap(), Some(second));
    drivers.kill(second).await.unwrap();
    drivers.exited(second).await.unwrap();
    assert_eq!((ours.running(), theirs.running()), (1, 0));
    match drivers.start(&vmm_config("absent")).await {
        Err(DriverError::Unknown { name }) => assert_eq!(name, "absent"),
        other => panic!("{other:?}"),
    }
    assert!(drivers.snapshots(&vmm_config("absent")).is_none());
}

#[tokio::test]
async fn combined_drivers_conform_like_a_single_driver() {
    let other = Arc::new(FakeDriver::named(FakeMachines::new(), "other"));
    let ours = FakeMachines::new();
    let both = || Drivers::new(Arc::new(FakeDriver::new(ours.clone())), vec![other.clone()]);
    for name in ["", "other"] {
        conformance::check_snapshots(&both(), &vmm_config(name)).await;
        conformance::check_templates(&both(), &vmm_config(name)).await;
    }
}
