//! vCenter simulator, and the specifications that tests use.
#![allow(dead_code, reason = "each test program uses its own part")]

use std::{collections::BTreeMap, time::Duration};

use coracle_testkit::vcsim::Vcsim;
use coracle_vsphere::{
    Credentials, SiteSpec, SoapOptions, SoapVsphere, VmConfigSpec, VsphereError, VsphereMetrics,
};

pub(crate) fn vcsim(args: &[&str]) -> anyhow::Result<Option<Vcsim>> {
    // A process has one TLS provider, and any test may run first.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    Vcsim::start_or_skip(args)
}

pub(crate) fn secret(vcsim: &Vcsim) -> BTreeMap<String, Vec<u8>> {
    [("server", vcsim.url()), ("username", "user"), ("password", "pass"), ("thumbprint", vcsim.thumbprint())]
        .map(|(k, v)| (k.to_owned(), v.as_bytes().to_vec()))
        .into()
}

pub(crate) fn credentials(vcsim: &Vcsim) -> Credentials {
    Credentials::parse(&secret(vcsim)).unwrap()
}

pub(crate) fn options() -> SoapOptions {
    SoapOptions {
        coalesce: Duration::from_millis(10),
        upload_idle: Duration::from_secs(2),
        ..SoapOptions::default()
    }
}

pub(crate) async fn client(credentials: &Credentials) -> Result<SoapVsphere, VsphereError> {
    SoapVsphere::open(credentials, options(), VsphereMetrics::default()).await
}

pub(crate) fn site_spec() -> SiteSpec {
    SiteSpec {
        datacenter: "DC0".into(),
        datastore_cluster: "DC0_POD0".into(),
        iso_datastore: "LocalDS_0".into(),
        resource_pool: "DC0_C0/Resources".into(),
        folder: "clusters/demo".into(),
        network: "VM Network".into(),
    }
}

pub(crate) fn vm_spec(name: &str, n: u8) -> VmConfigSpec {
    VmConfigSpec {
        name: name.into(),
        uuid: format!("11111111-2222-5333-8444-{n:012x}"),
        instance_uuid: format!("66666666-7777-5888-9999-{n:012x}"),
        guest_id: "rhel9_64Guest".into(),
        annotation: "agent-forge.containeroo.ch/vsphere-agent-uid=u-1".into(),
        cpus: 4,
        memory_mib: 16384,
        disk_gib: 100,
        eager_disk: false,
        firmware: "efi".into(),
        controller: "pvscsi".into(),
        adapter: "vmxnet3".into(),
        iso: "[LocalDS_0] agent-forge/a.iso".into(),
        directory: String::new(),
        names_host: false,
    }
}
