//! Steps of a pod that runs: volumes, then its VM, then its containers.

use std::time::Duration;

use coracle_record::Sandbox;

use crate::bandwidth::bandwidth;
use crate::env::FieldContext;
use crate::events::PodEvent;
use crate::fields;
use crate::network::{hostname, hosts_file, resolver};
use crate::observed::SandboxPhase;
use crate::plan_builder::PlanBuilder;
use crate::reason;
use crate::resources::vm_size;
use crate::step::{HostPort, SandboxSpec, Step, Target};
use crate::volume::{VolumeContent, VolumeError, desired, due, sandbox_volumes};
use k8s_openapi::api::core::v1::{ContainerPort, Pod};

/// Retry interval of a volume or container whose objects are missing.
pub(super) const MISSING_RETRY: Duration = Duration::from_secs(10);

impl PlanBuilder<'_> {
    pub(super) fn run(&mut self) {
        self.ignored_fields();
        let phase = self.o.runtime.sandbox.as_ref().map(|sandbox| sandbox.phase);
        if phase == Some(SandboxPhase::Suspended) {
            return;
        }
        let volumes_ready = self.volumes();
        match phase {
            None | Some(SandboxPhase::Created | SandboxPhase::Down | SandboxPhase::Starting) => {
                if volumes_ready {
                    self.start_sandbox();
                }
            }
            Some(SandboxPhase::Ready) => {
                self.measure();
                self.containers(volumes_ready);
            }
            Some(SandboxPhase::Stopping | SandboxPhase::Suspended) => {}
        }
    }

    fn ignored_fields(&mut self) {
        let ignored = fields::review(self.o.pod).ignored;
        if !ignored.is_empty() {
            let list: Vec<_> =
                ignored.iter().map(|field| format!("{}: {}", field.path, field.note)).collect();
            let message = format!("fields without effect on this node: {}", list.join("; "));
            self.event(PodEvent::warning(reason::IGNORED_FIELDS, None, message));
        }
    }

    pub(super) fn fields_context(&self) -> FieldContext<'_> {
        let addresses = self.o.runtime.sandbox.as_ref().map(|sandbox| sandbox.addresses.as_slice());
        FieldContext { pod: self.o.pod, node: self.o.node, addresses: addresses.unwrap_or_default() }
    }

    /// Requests tokens and writes the files of all volumes. Returns whether all are up to date.
    fn volumes(&mut self) -> bool {
        let (wanted, next) = due(self.o.pod, &self.o.memory.tokens, self.o.now);
        for request in wanted {
            let target = Target::Token(request.volume.clone(), request.path.clone());
            if self.is_free(&target) {
                self.retry(target, Step::RequestToken(request));
            }
        }
        if let Some(next) = next {
            self.wake_at(next);
        }
        let mut ready = true;
        for content in desired(&self.fields_context(), self.o.objects, &self.o.memory.tokens) {
            match content {
                Ok(content) => ready &= self.write(content),
                Err(VolumeError::NoToken { .. }) => ready = false,
                Err(error @ VolumeError::Missing { .. }) => {
                    self.event(PodEvent::warning(reason::FAILED_MOUNT, None, error.to_string()));
                    self.wake_after(MISSING_RETRY);
                    ready = false;
                }
            }
        }
        ready
    }

    /// Returns whether the volume has this content; writes it otherwise.
    fn write(&mut self, content: VolumeContent) -> bool {
        if self.o.memory.volumes.get(&content.name) == Some(&content.digest()) {
            return true;
        }
        let target = Target::Volume(content.name.clone());
        if self.is_free(&target) {
            self.retry(target, Step::WriteVolume(Box::new(content)));
        }
        false
    }

    fn start_sandbox(&mut self) {
        if !self.is_free(&Target::Sandbox) {
            return;
        }
        match self.sandbox_spec() {
            Ok(spec) => self.retry(Target::Sandbox, Step::StartSandbox(Box::new(spec))),
            Err(why) => {
                self.event(PodEvent::warning(reason::FAILED_CREATE_POD_SANDBOX, None, why));
                self.wake_after(MISSING_RETRY);
            }
        }
    }

    fn sandbox_spec(&self) -> Result<SandboxSpec, String> {
        let (pod, node) = (self.o.pod, self.o.node);
        let (vcpus, memory) = vm_size(pod, node);
        let resolver = resolver(pod, node);
        let bandwidth = pod.metadata.annotations.as_ref().map(bandwidth).transpose();
        let sysctls = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
        let sysctls = sysctls.and_then(|context| context.sysctls.as_ref());
        let sysctls = sysctls.into_iter().flatten().map(|one| (one.name.clone(), one.value.clone()));
        Ok(SandboxSpec {
            vcpus,
            memory,
            hostname: hostname(pod, node).map_err(|error| error.to_string())?,
            sandbox: Sandbox {
                nameservers: resolver.nameservers,
                search_domains: resolver.searches,
                resolver_options: resolver.options,
                sysctls: sysctls.collect(),
                hosts: Some(hosts_file(pod, node)),
            },
            volumes: sandbox_volumes(pod, self.o.objects).map_err(|error| error.to_string())?,
            ports: host_ports(pod)?,
            bandwidth: bandwidth.map_err(|error| error.to_string())?.flatten(),
        })
    }
}

fn host_ports(pod: &Pod) -> Result<Vec<HostPort>, String> {
    let containers = crate::declared::declared(pod);
    let ports = containers.iter().flat_map(|one| one.container.ports.iter().flatten());
    ports.filter(|port| port.host_port.is_some_and(|port| port != 0)).map(host_port).collect()
}

fn host_port(port: &ContainerPort) -> Result<HostPort, String> {
    let number = |value: i32| {
        u16::try_from(value).ok().filter(|port| *port != 0).ok_or_else(|| format!("invalid port {value}"))
    };
    let address = port.host_ip.as_deref().filter(|ip| !ip.is_empty() && *ip != "0.0.0.0");
    let address = address.map(|ip| ip.parse().map_err(|_| format!("invalid hostIP {ip:?}"))).transpose()?;
    Ok(HostPort {
        udp: match port.protocol.as_deref() {
            None | Some("TCP") => false,
            Some("UDP") => true,
            Some(other) => return Err(format!("invalid protocol {other:?}: TCP and UDP can be forwarded")),
        },
        host_address: address,
        host_port: number(port.host_port.unwrap_or(0))?,
        container_port: number(port.container_port)?,
    })
}
