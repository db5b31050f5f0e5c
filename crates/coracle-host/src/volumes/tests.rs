use super::*;

fn found(path: &str, what: What) -> Found {
    Found { path: path.into(), inode: (1, path.len() as u64), what, dirty: false }
}

fn wish(name: &str, target: &str, read_only: bool) -> VolumeWish {
    VolumeWish { name: name.into(), target: target.into(), read_only, ..VolumeWish::default() }
}

#[test]
fn names_and_places_come_from_the_source() {
    for (path, what, name, target) in [
        ("/v/Data Set.img", What::Raw, "data-set", "/dev/data-set"),
        ("/v/data.ext4", What::Disk(Filesystem::Ext4), "data", "/mnt/data"),
        ("/srv/www", What::Folder, "www", "/mnt/www"),
    ] {
        let volume = place(&[], &VolumeWish::default(), &found(path, what)).unwrap();
        assert_eq!((volume.name.as_str(), volume.target.as_str()), (name, target));
    }
}

#[test]
fn slots_are_taken_by_kind_until_there_is_none() {
    let mut volumes = vec![];
    for want in [13, 14, 15] {
        let name = format!("w{want}");
        let next = place(&volumes, &wish(&name, "", false), &found("/w", What::Raw)).unwrap();
        assert_eq!(next.slot(), Some(want));
        assert!(!next.disk().unwrap().read_only);
        volumes.push(next);
    }
    let full = place(&volumes, &wish("more", "", false), &found("/w", What::Raw)).unwrap_err();
    assert!(full.contains("no free slot for a writable disk"), "{full}");
    let image = place(&volumes, &wish("image", "", false), &found("/i", What::Disk(Filesystem::Erofs)));
    let image = image.unwrap();
    assert_eq!((image.slot(), image.read_only), (Some(1), true), "EROFS is never written");
    assert!(image.disk().unwrap().read_only);
    let gap = volumes.remove(1);
    let back = place(&volumes, &wish("more", "", false), &found("/w", What::Raw)).unwrap();
    assert_eq!(back.slot(), gap.slot(), "a gap is filled, the others keep their slots");
}

#[test]
fn what_does_not_fit_is_refused_with_what_to_do() {
    let data = place(&[], &wish("data", "/data", false), &found("/d", What::Raw)).unwrap();
    let www = place(&[], &wish("www", "/www", false), &found("/w", What::Folder)).unwrap();
    let have = [data, www];
    for (wish, words) in [
        (wish("data", "/other", false), "already: choose another name"),
        (wish("other", "/data/", false), "choose another place"),
        (wish("Bad", "/x", false), "is no name"),
        (wish("x", "/www/x", false), "overlap: choose another place"),
        (wish("x", "relative", false), "no absolute path"),
        (wish("x", "/a/../b", false), "no absolute path"),
        (wish("x", "/", false), "no absolute path"),
        (wish("x", "/proc/x", false), "the guest's own"),
        (wish("x", "/dev", false), "the guest's own"),
    ] {
        let refused = place(&have, &wish, &found("/d", What::Raw)).unwrap_err();
        assert!(refused.contains(words), "{wish:?}: {refused}");
    }
}

#[test]
fn a_disk_that_was_not_left_is_written_before_it_is_read() {
    let left = Found { dirty: true, ..found("/d", What::Disk(Filesystem::Ext4)) };
    assert!(place(&[], &wish("data", "", false), &left).is_ok());
    let refused = place(&[], &wish("data", "", true), &left).unwrap_err();
    assert!(refused.contains("attach it once to be written"), "{refused}");
}

#[test]
fn a_disk_has_many_readers_or_one_writer() {
    let [a, b] = ["a", "b"].map(|name| VmId::of_name(&name.parse().unwrap()));
    let disk = found("/d", What::Raw);
    let volume = |read_only| place(&[], &wish("data", "", read_only), &disk).unwrap();
    let claims = Claims::default();
    claims.claim(&a, &volume(true), &disk).unwrap();
    claims.claim(&b, &volume(true), &disk).unwrap();
    claims.release(&b, "data");
    let refused = claims.claim(&b, &volume(false), &disk).unwrap_err();
    assert!(refused.contains(a.as_str()), "{refused}");
    claims.release_all(&a);
    claims.claim(&b, &volume(false), &disk).unwrap();
    assert!(claims.claim(&a, &volume(true), &disk).is_err(), "nobody reads what another writes");
    assert!(claims.claim(&b, &volume(true), &disk).is_err(), "not even the same VM");
}

#[test]
fn sources_are_looked_at() {
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
    let look = |source: &str, size_mib| {
        let source = if source.starts_with('.') {
            allowed.join(source).display().to_string()
        } else {
            source.to_owned()
        };
        super::look(&config, &VolumeWish { source, size_mib, ..VolumeWish::default() })
    };
    assert_eq!(look("./ext4", None).unwrap().what, What::Disk(Filesystem::Ext4));
    assert!(!look("./ext4", None).unwrap().dirty && look("./dirty", None).unwrap().dirty);
    assert_eq!(look("./raw", None).unwrap().what, What::Raw);
    assert_eq!(look("./", None).unwrap().what, What::Folder);
    for (source, size, words) in [
        ("./link", None, "--volume-dir"),
        ("./../outside", None, "--volume-dir"),
        ("./absent", None, "No such file"),
        ("./odd", None, "no multiple of 512"),
        ("./raw", Some(1), "by name"),
        ("relative/path", None, "neither a path nor a name"),
        ("data", None, "give a size"),
    ] {
        let refused = look(source, size).unwrap_err();
        assert!(refused.contains(words), "{source}: {refused}");
    }
    let made = look("data", Some(16)).unwrap();
    assert_eq!((made.what, made.path), (What::Disk(Filesystem::Ext4), root.join("state/volumes/data.ext4")));
    assert_eq!(look("data", None).unwrap().inode, made.inode, "it is kept");
}
