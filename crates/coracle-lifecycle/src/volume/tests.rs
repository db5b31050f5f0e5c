use super::*;

fn found(path: &str, kind: SourceKind) -> VolumeSource {
    VolumeSource { path: path.into(), inode: (1, path.len() as u64), kind, dirty: false }
}

fn request(name: &str, target: &str, read_only: bool) -> VolumeRequest {
    VolumeRequest { name: name.into(), target: target.into(), read_only, ..VolumeRequest::default() }
}

#[test]
fn volume_name_and_target_derive_from_the_source() {
    for (path, kind, name, target) in [
        ("/v/Data Set.img", SourceKind::Raw, "data-set", "/dev/data-set"),
        ("/v/data.ext4", SourceKind::Disk(Filesystem::Ext4), "data", "/mnt/data"),
        ("/srv/www", SourceKind::Directory, "www", "/mnt/www"),
    ] {
        let volume = plan_volume(&[], &[], &VolumeRequest::default(), &found(path, kind)).unwrap();
        assert_eq!((volume.name.as_str(), volume.target.as_str()), (name, target));
    }
}

#[test]
fn device_slots_are_taken_by_kind_until_exhausted() {
    let mut volumes = vec![];
    for want in [13, 14, 15] {
        let name = format!("w{want}");
        let next =
            plan_volume(&volumes, &[], &request(&name, "", false), &found("/w", SourceKind::Raw)).unwrap();
        assert_eq!(next.slot(), Some(want));
        assert!(!coracle_instance::vmm_config::volume_disk(&next).unwrap().read_only);
        volumes.push(next);
    }
    let full =
        plan_volume(&volumes, &[], &request("more", "", false), &found("/w", SourceKind::Raw)).unwrap_err();
    assert!(full.contains("no free slot for a writable disk"), "{full}");
    let image = plan_volume(
        &volumes,
        &[],
        &request("image", "", false),
        &found("/i", SourceKind::Disk(Filesystem::Erofs)),
    );
    let image = image.unwrap();
    assert_eq!((image.slot(), image.read_only), (Some(1), true), "EROFS is never written");
    assert!(coracle_instance::vmm_config::volume_disk(&image).unwrap().read_only);
    let gap = volumes.remove(1);
    let back =
        plan_volume(&volumes, &[], &request("more", "", false), &found("/w", SourceKind::Raw)).unwrap();
    assert_eq!(back.slot(), gap.slot(), "a gap is filled, the others keep their slots");
}

#[test]
fn shared_directory_limit_does_not_count_disks() {
    let dir = found("/srv", SourceKind::Directory);
    let mut volumes = vec![];
    for number in 0..SHARED_DIRS_MAX {
        let next = plan_volume(&volumes, &[], &request(&format!("d{number}"), "", false), &dir).unwrap();
        volumes.push(next);
    }
    let full = plan_volume(&volumes, &[], &request("more", "", false), &dir).unwrap_err();
    assert!(full.contains("48 shared directories") && full.contains("detach one"), "{full}");
    plan_volume(&volumes, &[], &request("disk", "", false), &found("/d", SourceKind::Raw)).unwrap();
    volumes.pop();
    plan_volume(&volumes, &[], &request("more", "", false), &dir).unwrap();
}

#[test]
fn invalid_volume_request_is_refused_with_advice() {
    let data =
        plan_volume(&[], &[], &request("data", "/data", false), &found("/d", SourceKind::Raw)).unwrap();
    let www =
        plan_volume(&[], &[], &request("www", "/www", false), &found("/w", SourceKind::Directory)).unwrap();
    let have = [data, www];
    for (request, words) in [
        (request("data", "/other", false), "already: choose another name"),
        (request("other", "/data/", false), "choose another place"),
        (request("Bad", "/x", false), "invalid volume name"),
        (request("x", "/www/x", false), "overlap: choose another place"),
        (request("x", "relative", false), "not an absolute path"),
        (request("x", "/a/../b", false), "not an absolute path"),
        (request("x", "/", false), "not an absolute path"),
        (request("x", "/proc/x", false), "the guest's own"),
        (request("x", "/dev", false), "the guest's own"),
    ] {
        let refused = plan_volume(&have, &[], &request, &found("/d", SourceKind::Raw)).unwrap_err();
        assert!(refused.contains(words), "{request:?}: {refused}");
    }
}

#[test]
fn dirty_disk_is_refused_as_read_only() {
    let left = VolumeSource { dirty: true, ..found("/d", SourceKind::Disk(Filesystem::Ext4)) };
    assert!(plan_volume(&[], &[], &request("data", "", false), &left).is_ok());
    let refused = plan_volume(&[], &[], &request("data", "", true), &left).unwrap_err();
    assert!(refused.contains("attach it once to be written"), "{refused}");
}

#[test]
fn disk_has_many_readers_or_one_writer() {
    let [a, b] = ["a", "b"].map(|name| VmId::of_name(&name.parse().unwrap()));
    let disk = found("/d", SourceKind::Raw);
    let volume = |read_only| plan_volume(&[], &[], &request("data", "", read_only), &disk).unwrap();
    let claims = Claims::default();
    claims.claim(&a, &volume(true), &disk).unwrap();
    claims.claim(&b, &volume(true), &disk).unwrap();
    claims.release(&b, "data");
    let refused = claims.claim(&b, &volume(false), &disk).unwrap_err();
    assert!(refused.contains(a.as_str()), "{refused}");
    claims.release_all(&a);
    claims.claim(&b, &volume(false), &disk).unwrap();
    assert!(claims.claim(&a, &volume(true), &disk).is_err(), "a disk that is written has no readers");
    assert!(claims.claim(&b, &volume(true), &disk).is_err(), "not even the same VM");
}

#[test]
fn volume_sources_are_classified_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let mut config = HostConfig::new(root.join("state"), "/k".into(), "/i".into());
    let allowed = root.join("allowed");
    std::fs::create_dir(&allowed).unwrap();
    config.volume_dirs = vec![allowed.clone()];
    std::fs::write(root.join("outside"), vec![0; 512]).unwrap();
    std::os::unix::fs::symlink(root.join("outside"), allowed.join("link")).unwrap();
    std::fs::write(allowed.join("odd"), "x").unwrap();
    let mut ext4 = vec![0; 4096];
    ext4[1080..1082].copy_from_slice(&[0x53, 0xEF]);
    std::fs::write(allowed.join("ext4"), &ext4).unwrap();
    ext4[1024 + 0x60] = 4;
    std::fs::write(allowed.join("dirty"), &ext4).unwrap();
    std::fs::write(allowed.join("raw"), vec![0; 512]).unwrap();
    let inspect = |source: &str, size_mib| {
        let source = if source.starts_with('.') {
            allowed.join(source).display().to_string()
        } else {
            source.to_owned()
        };
        super::inspect_source(&config, &VolumeRequest { source, size_mib, ..VolumeRequest::default() })
    };
    assert_eq!(inspect("./ext4", None).unwrap().kind, SourceKind::Disk(Filesystem::Ext4));
    assert!(!inspect("./ext4", None).unwrap().dirty && inspect("./dirty", None).unwrap().dirty);
    assert_eq!(inspect("./raw", None).unwrap().kind, SourceKind::Raw);
    assert_eq!(inspect("./", None).unwrap().kind, SourceKind::Directory);
    for (source, size, words) in [
        ("./link", None, "--volume-dir"),
        ("./../outside", None, "--volume-dir"),
        ("./absent", None, "No such file"),
        ("./odd", None, "not a multiple of 512"),
        ("./raw", Some(1), "by name"),
        ("relative/path", None, "neither a path nor a name"),
        ("data", None, "give a size"),
    ] {
        let refused = inspect(source, size).unwrap_err();
        assert!(refused.contains(words), "{source}: {refused}");
    }
    let made = inspect("data", Some(16)).unwrap();
    assert_eq!(
        (made.kind, made.path),
        (SourceKind::Disk(Filesystem::Ext4), root.join("state/volumes/data.ext4"))
    );
    assert_eq!(inspect("data", None).unwrap().inode, made.inode, "it is kept");
}
