//! Requests to the guest about containers. Pure.

use coracle_proto::guest as pb;
use coracle_record::{
    ContainerMountSource, ContainerRecord, ContainerState, GroupsPolicy, PidNamespace, Resources, Security,
};

use coracle_instance::vmm_config::device;

/// File system of image files.
const IMAGE_FS: &str = "erofs";

/// Action that makes the guest agree with the record of one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settle {
    /// Record and guest agree, or the guest will report the exit.
    Keep,
    /// Create the container in the guest: its record was written, then the creation was interrupted.
    Make,
    /// Record the start, which the record lacks.
    Started,
    /// The guest has lost the container.
    Lost,
    /// Remove the container, which has no record: its creation or removal was interrupted.
    Remove,
}

/// Compares the recorded state of a container with the state that its guest reports.
pub fn settle(recorded: Option<ContainerState>, guest: Option<pb::WorkloadState>) -> Settle {
    use pb::WorkloadState as Guest;
    match (recorded, guest) {
        (None, None) => Settle::Keep,
        (None, Some(_)) => Settle::Remove,
        (Some(ContainerState::Created), None) => Settle::Make,
        (Some(ContainerState::Created), Some(Guest::Running | Guest::Exited)) => Settle::Started,
        (Some(ContainerState::Running), None) => Settle::Lost,
        // The record says that the container was started, and a guest cannot undo that.
        (Some(ContainerState::Running), Some(Guest::NotStarted | Guest::Unspecified)) => Settle::Lost,
        (Some(ContainerState::Created), Some(Guest::NotStarted | Guest::Unspecified))
        | (Some(ContainerState::Running), Some(Guest::Running | Guest::Exited))
        | (Some(ContainerState::Exited), _) => Settle::Keep,
    }
}

/// Returns the request to the guest to create a container. `slot` returns the slot of an image by its digest. Returns `None` if
/// an image has no slot.
pub fn create_request(
    record: &ContainerRecord,
    slot: impl Fn(&str) -> Option<usize>,
) -> Option<pb::CreateContainerRequest> {
    let spec = &record.spec;
    let (pid_namespace, target_container) = match &spec.pid_namespace {
        PidNamespace::Container => (pb::PidNamespace::Container, String::new()),
        PidNamespace::Pod => (pb::PidNamespace::Pod, String::new()),
        PidNamespace::Target(id) => (pb::PidNamespace::Target, id.to_string()),
    };
    Some(pb::CreateContainerRequest {
        id: record.id.to_string(),
        image_device: device(slot(&record.image_digest)?),
        image_fs: IMAGE_FS.to_owned(),
        read_only_root: spec.read_only_root,
        process: Some(process(spec)),
        mounts: spec.mounts.iter().map(|m| mount(m, &slot)).collect::<Option<_>>()?,
        security: Some(security(&spec.security)),
        cgroup: Some(limits(&spec.resources)),
        pid_namespace: pid_namespace.into(),
        target_container,
        stop_signal: spec.stop_signal,
        stdin_once: spec.stdin_once,
        termination_message_path: spec.termination_message_path.clone(),
    })
}

/// Returns the process of a container.
pub fn process(spec: &coracle_record::ContainerSpec) -> pb::Process {
    let policy = match spec.groups_policy {
        GroupsPolicy::OfUser => pb::GroupsPolicy::Unspecified,
        GroupsPolicy::Merge => pb::GroupsPolicy::Merge,
        GroupsPolicy::Strict => pb::GroupsPolicy::Strict,
    };
    pb::Process {
        argv: spec.process.argv.clone(),
        env: spec.process.env.clone(),
        user: spec.process.user.clone(),
        cwd: spec.process.cwd.clone(),
        tty: spec.tty,
        stdin: spec.stdin,
        groups_policy: policy.into(),
        groups: spec.groups.clone(),
        ..pb::Process::default()
    }
}

fn mount(
    mount: &coracle_record::ContainerMount,
    slot: impl Fn(&str) -> Option<usize>,
) -> Option<pb::ContainerMount> {
    use pb::container_mount::Source;
    let source = match &mount.source {
        ContainerMountSource::Volume { name, sub_path } => {
            Source::Volume(pb::VolumeSource { name: name.clone(), sub_path: sub_path.clone() })
        }
        ContainerMountSource::Tmpfs { size_bytes, mode } => Source::Tmpfs(pb::TmpfsSource {
            size_bytes: *size_bytes,
            mode: *mode,
            ..pb::TmpfsSource::default()
        }),
        ContainerMountSource::Image { digest, sub_path } => Source::Image(pb::ImageSource {
            device: device(slot(digest)?),
            fs: IMAGE_FS.to_owned(),
            sub_path: sub_path.clone(),
        }),
    };
    let (target, read_only) = (mount.target.clone(), mount.read_only);
    Some(pb::ContainerMount { target, read_only, source: Some(source) })
}

fn security(security: &Security) -> pb::Security {
    let rlimit = |(resource, soft, hard): &(u32, u64, u64)| pb::Rlimit {
        resource: *resource,
        soft: *soft,
        hard: *hard,
    };
    pb::Security {
        capabilities: security.capabilities,
        no_new_privileges: security.no_new_privileges,
        masked_paths: security.masked_paths.clone(),
        read_only_paths: security.read_only_paths.clone(),
        rlimits: security.rlimits.iter().map(rlimit).collect(),
        oom_score_adj: security.oom_score_adj,
        seccomp: security.seccomp.clone(),
        privileged: security.privileged,
        user_namespace: security
            .user_namespace
            .map(|ids| pb::UserNamespace { first: ids.first(), length: ids.length() }),
    }
}

/// Returns the limits of a container, as the guest sets them.
pub fn limits(resources: &Resources) -> pb::CgroupLimits {
    pb::CgroupLimits {
        cpu_quota_us: resources.cpu_quota_us,
        cpu_weight: resources.cpu_weight,
        memory_max_bytes: resources.memory_max_bytes,
        pids_max: resources.pids_max,
        unified: resources.unified.clone(),
    }
}

#[cfg(test)]
mod tests {
    use coracle_record::{ContainerMount, ContainerSpec, Workload};
    use coracle_types::UnixMillis;

    use super::*;

    #[test]
    fn container_settlement_table() {
        use ContainerState::{Created, Exited, Running};
        use pb::WorkloadState as Guest;
        for (recorded, guest, want) in [
            (None, None, Settle::Keep),
            (None, Some(Guest::NotStarted), Settle::Remove),
            (None, Some(Guest::Running), Settle::Remove),
            (None, Some(Guest::Exited), Settle::Remove),
            (Some(Created), None, Settle::Make),
            (Some(Created), Some(Guest::NotStarted), Settle::Keep),
            (Some(Created), Some(Guest::Running), Settle::Started),
            (Some(Created), Some(Guest::Exited), Settle::Started),
            (Some(Running), None, Settle::Lost),
            (Some(Running), Some(Guest::NotStarted), Settle::Lost),
            (Some(Running), Some(Guest::Running), Settle::Keep),
            (Some(Running), Some(Guest::Exited), Settle::Keep),
            (Some(Exited), None, Settle::Keep),
            (Some(Exited), Some(Guest::Running), Settle::Keep),
            (Some(Exited), Some(Guest::Exited), Settle::Keep),
        ] {
            assert_eq!(settle(recorded, guest), want, "{recorded:?} {guest:?}");
        }
    }

    #[test]
    fn create_request_carries_the_container_record() {
        let source = ContainerMountSource::Volume { name: "data".into(), sub_path: "a".into() };
        let image = ContainerMountSource::Image { digest: "b".into(), sub_path: "en".into() };
        let spec = ContainerSpec {
            process: Workload { argv: vec!["sh".into()], user: "web".into(), ..Workload::default() },
            mounts: vec![
                ContainerMount { target: "/data".into(), read_only: true, source },
                ContainerMount { target: "/model".into(), read_only: true, source: image },
            ],
            security: Security { rlimits: vec![(7, 1, 2)], ..Security::default() },
            resources: Resources { pids_max: Some(5), ..Resources::default() },
            pid_namespace: PidNamespace::Target("main".parse().unwrap()),
            stop_signal: 3,
            ..ContainerSpec::default()
        };
        let record = ContainerRecord::new("web".parse().unwrap(), spec, "a".into(), UnixMillis(0));
        assert_eq!(create_request(&record, |digest| (digest == "a").then_some(3)), None, "b is nowhere");
        let request = create_request(&record, |digest| Some(if digest == "a" { 3 } else { 4 })).unwrap();
        assert_eq!(request.image_device, "/dev/disk/by-id/virtio-slot3");
        let (security, process) = (request.security.clone().unwrap(), request.process.clone().unwrap());
        assert_eq!((security.rlimits[0].soft, process.user.as_str()), (1, "web"));
        assert_eq!(
            (request.pid_namespace(), request.target_container.as_str()),
            (pb::PidNamespace::Target, "main")
        );
        assert_eq!((request.stop_signal, request.cgroup.unwrap().pids_max), (3, Some(5)));
        assert!(request.mounts[0].read_only);
        let Some(pb::container_mount::Source::Image(image)) = &request.mounts[1].source else {
            panic!("not an image: {:?}", request.mounts)
        };
        assert_eq!((image.device.as_str(), image.sub_path.as_str()), ("/dev/disk/by-id/virtio-slot4", "en"));
    }
}
