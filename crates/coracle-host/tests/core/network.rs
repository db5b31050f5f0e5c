//! Calls of the host core to its network.

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use coracle_hypervisor::Forward;
use coracle_hypervisor_testing::AddressOnly;
use coracle_net::{Attachment, Endpoint, GuestNic, Lease, NetError, Network, NetworkRequest, Subnet};
use coracle_testkit::elapse;
use coracle_types::{InstanceId, VmId};

use super::support::{IMAGE, Node, create};
use coracle_host::VmSpec;
use coracle_oci::NoProgress;

/// Network that leases addresses of a subnet and records the calls.
#[derive(Debug)]
struct Recorder {
    addresses: AddressOnly,
    calls: Mutex<Vec<String>>,
}

impl Recorder {
    fn new(subnet: &str) -> Arc<Self> {
        let addresses = AddressOnly::new(subnet.parse().unwrap());
        Arc::new(Self { addresses, calls: Mutex::default() })
    }

    fn note(&self, call: String) {
        self.calls.lock().unwrap().push(call);
    }

    fn calls(&self) -> Vec<String> {
        self.calls.lock().unwrap().clone()
    }
}

/// Name that is part of a VM's id.
fn name(id: &VmId) -> String {
    id.as_str().rsplit_once('-').map_or(id.as_str(), |(name, _)| name).to_owned()
}

#[async_trait]
impl Network for Recorder {
    fn mode(&self) -> &'static str {
        "none"
    }

    fn subnet(&self) -> Option<Subnet> {
        self.addresses.subnet()
    }

    async fn prepare(&self, guests: &[GuestNic]) -> Result<(), NetError> {
        let guests: Vec<_> = guests.iter().map(|guest| guest.address.to_string()).collect();
        self.note(format!("prepare [{}]", guests.join(" ")));
        Ok(())
    }

    async fn setup(&self, id: &VmId, request: &NetworkRequest) -> Result<(), NetError> {
        let (network, address) = (request.network.as_deref().unwrap_or("any"), request.address);
        let address = address.map_or("any".to_owned(), |address| address.to_string());
        self.note(format!("setup {} on {network} with {address}", name(id)));
        if request.network.as_deref() == Some("broken") {
            return Err(NetError::Moved {
                wanted: Ipv4Addr::UNSPECIFIED.into(),
                given: Ipv4Addr::UNSPECIFIED.into(),
            });
        }
        Ok(())
    }

    async fn remove(&self, id: &VmId) -> Result<(), NetError> {
        // Takes some time, as plugins do.
        elapse(Duration::from_millis(100)).await;
        self.note(format!("remove {}", name(id)));
        Ok(())
    }

    async fn collect(&self, keep: &HashSet<VmId>) -> Result<Vec<VmId>, NetError> {
        let mut keep: Vec<_> = keep.iter().map(name).collect();
        keep.sort();
        self.note(format!("collect but [{}]", keep.join(" ")));
        Ok(vec![])
    }

    fn lease(&self, id: &VmId, wanted: Option<Ipv4Addr>) -> Result<Option<Lease>, NetError> {
        self.addresses.lease(id, wanted)
    }

    fn claim_ports(&self, id: &VmId, ports: &[Forward]) -> Result<(), NetError> {
        self.addresses.claim_ports(id, ports)
    }

    fn release(&self, id: &VmId) {
        self.addresses.release(id);
    }

    async fn create_interface(&self, id: &InstanceId) -> Result<Attachment, NetError> {
        self.addresses.create_interface(id).await
    }

    async fn attach(&self, id: &InstanceId, endpoint: &Endpoint) -> Result<Attachment, NetError> {
        self.note("attach".to_owned());
        self.addresses.attach(id, endpoint).await
    }

    async fn cut_off(&self, _: &InstanceId) -> Result<(), NetError> {
        self.note("cut off".to_owned());
        Ok(())
    }

    async fn detach(&self, id: &InstanceId) -> Result<(), NetError> {
        self.addresses.detach(id).await
    }

    async fn sweep(&self, keep: &HashSet<InstanceId>) -> Result<Vec<String>, NetError> {
        self.addresses.sweep(keep).await
    }

    async fn teardown(&self) -> Result<(), NetError> {
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn restart_prepares_the_filter_of_running_vms_first() {
    let node = Node::new().await;
    let host = node.open().await;
    for name in ["off", "on"] {
        create(&host, name).await;
    }
    let address = host.start("on", None).await.unwrap().address.unwrap();
    let network = Recorder::new("10.100.0.0/24");
    assert!(node.try_open(network.clone(), "other images").await.is_err(), "the state is locked");
    assert_eq!(network.calls(), [""; 0], "a second daemon does not touch the network");
    host.shutdown().await;
    drop(host);
    let host = node.try_open(network.clone(), "images").await.unwrap();
    assert_eq!(network.calls()[0], format!("prepare [{address}]"));
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn running_vm_outside_the_new_subnet_is_cut_off() {
    let node = Node::new().await;
    let host = node.open().await;
    create(&host, "web").await;
    host.start("web", None).await.unwrap();
    host.shutdown().await;
    drop(host);
    let network = Recorder::new("10.200.0.0/24");
    let host = node.try_open(network.clone(), "images").await.unwrap();
    let mut view = host.observe("web").unwrap();
    let told = view.wait_for(|view| view.record.message.starts_with("cut off from the network"));
    tokio::time::timeout(std::time::Duration::from_secs(10), told).await.unwrap().unwrap();
    assert_eq!(network.calls().last().unwrap(), "cut off");
    host.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn network_of_a_vm_is_made_before_and_removed_after_it() {
    let node = Node::new().await;
    let network = Recorder::new("10.100.0.0/24");
    let host = node.try_open(network.clone(), "images").await.unwrap();
    let spec = |name: &str, on: &str| VmSpec {
        network: Some(on.to_owned()),
        ..VmSpec::of(name.parse().unwrap(), IMAGE)
    };
    host.create(spec("web", "red"), Arc::new(NoProgress)).await.unwrap();
    host.create(spec("bad", "broken"), Arc::new(NoProgress)).await.unwrap_err();
    host.start("web", None).await.unwrap();
    host.delete("web", true, None).await.unwrap();
    let last = network.calls().pop().unwrap();
    assert_eq!(last, "remove web", "another VM may have the name, and its network, from now on");
    create(&host, "kept").await;
    host.shutdown().await;
    drop(host);
    let of_networks: Vec<_> = network.calls().into_iter().filter(|call| call.contains(' ')).collect();
    let want = [
        "prepare []",
        "collect but []",
        "setup web on red with any",
        "setup bad on broken with any",
        "remove bad",
        "setup web on any with 10.100.0.2",
        "remove web",
        "setup kept on any with any",
    ];
    assert_eq!(of_networks, want);
    let host = node.try_open(network.clone(), "images").await.unwrap();
    assert!(network.calls().contains(&"collect but [kept]".to_owned()), "{:?}", network.calls());
    host.shutdown().await;
}
