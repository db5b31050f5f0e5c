//! Real clients of the registry: skopeo, crane and oras-go push, pull, copy, list and delete.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::registry::RegistryDaemon;
use crate::support::CORACLE;
use coracle_testkit::oci::{ImageSpec, LayerTar, write_layout};
use coracle_testkit::tools;

/// Writes an OCI layout with one image of three layers; returns its digest.
fn layout(dir: &Path) -> String {
    let layer = |n: u8| LayerTar::new().file("f", 0o644, &vec![n; 200_000]).finish();
    write_layout(dir, &[layer(1), layer(2), layer(3)], &ImageSpec::default(), "1").unwrap()
}

/// Runs a client that must succeed; returns its stdout.
fn ok(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// Runs a client that must fail; returns its stderr.
fn refused(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(!output.status.success(), "{command:?} was let through");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Writes a docker configuration with the registry's token.
fn login(dir: &Path, registry: &RegistryDaemon) -> PathBuf {
    use base64::Engine;
    let auth = base64::engine::general_purpose::STANDARD.encode(format!("token:{}", registry.token()));
    let config = serde_json::json!({"auths": {registry.address.to_string(): {"auth": auth}}});
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    dir.to_owned()
}

#[test]
fn skopeo_pushes_pulls_copies_lists_and_deletes() {
    let Some([skopeo]) = tools::require(["skopeo"]) else { return };
    let dir = tempfile::tempdir().unwrap();
    let registry = RegistryDaemon::start(&dir.path().join("state"), &[]);
    let (source, copy) = (dir.path().join("source"), dir.path().join("copy"));
    let digest = layout(&source);
    let image = format!("docker://{}/team/app:1", registry.address);
    let creds = format!("token:{}", registry.token());
    let from = format!("oci:{}:1", source.display());
    let skopeo = |args: &[&str]| {
        let mut command = Command::new(&skopeo);
        command.args(args);
        command
    };
    let denied = refused(&mut skopeo(&["copy", "--dest-tls-verify=false", &from, &image]));
    assert!(
        denied.contains("authentication required")
            || denied.contains("unauthorized")
            || denied.contains("token"),
        "{denied}"
    );
    ok(&mut skopeo(&[
        "copy",
        "--preserve-digests",
        "--dest-tls-verify=false",
        "--dest-creds",
        &creds,
        &from,
        &image,
    ]));
    let shown = ok(&mut skopeo(&["inspect", "--tls-verify=false", "--format", "{{.Digest}}", &image]));
    assert_eq!(shown.trim(), digest, "anonymous reads");
    let second = format!("docker://{}/other/app:2", registry.address);
    ok(&mut skopeo(&[
        "copy",
        "--preserve-digests",
        "--src-tls-verify=false",
        "--dest-tls-verify=false",
        "--dest-creds",
        &creds,
        &image,
        &second,
    ]));
    ok(&mut skopeo(&[
        "copy",
        "--preserve-digests",
        "--src-tls-verify=false",
        &second,
        &format!("oci:{}:1", copy.display()),
    ]));
    let name = digest.trim_start_matches("sha256:");
    let same = |root: &Path| std::fs::read(root.join("blobs/sha256").join(name)).unwrap();
    assert_eq!(same(&source), same(&copy));
    let tags = ok(&mut skopeo(&[
        "list-tags",
        "--tls-verify=false",
        &format!("docker://{}/team/app", registry.address),
    ]));
    assert!(tags.contains("\"1\""), "{tags}");
    ok(&mut skopeo(&["delete", "--tls-verify=false", "--creds", &creds, &image]));
    refused(&mut skopeo(&["inspect", "--tls-verify=false", &image]));
    ok(&mut skopeo(&["inspect", "--tls-verify=false", &second]));
}

#[test]
fn crane_pushes_pulls_copies_lists_and_deletes() {
    let Some([crane]) = tools::require(["crane"]) else { return };
    let dir = tempfile::tempdir().unwrap();
    let registry = RegistryDaemon::start(&dir.path().join("state"), &[]);
    let (source, copy) = (dir.path().join("source"), dir.path().join("copy"));
    let digest = layout(&source);
    let config = login(&dir.path().join("docker"), &registry);
    let crane = |args: &[&str], known: bool| {
        let mut command = Command::new(&crane);
        command
            .args(args)
            .arg("--insecure")
            .env("DOCKER_CONFIG", if known { config.as_path() } else { dir.path() });
        command
    };
    let image = format!("{}/team/app:1", registry.address);
    let from = source.display().to_string();
    refused(&mut crane(&["push", &from, &image], false));
    ok(&mut crane(&["push", &from, &image], true));
    let index = ok(&mut crane(&["digest", &image], false));
    let second = format!("{}/other/app:2", registry.address);
    ok(&mut crane(&["copy", &image, &second], true));
    assert_eq!(ok(&mut crane(&["digest", &second], false)), index);
    ok(&mut crane(&["pull", "--format=oci", &second, &copy.display().to_string()], false));
    assert!(copy.join("blobs/sha256").join(digest.trim_start_matches("sha256:")).is_file());
    assert_eq!(ok(&mut crane(&["ls", &format!("{}/team/app", registry.address)], false)).trim(), "1");
    assert_eq!(
        ok(&mut crane(&["catalog", &registry.address.to_string()], false)).trim(),
        "other/app\nteam/app"
    );
    let named = format!("{}/team/app@{}", registry.address, index.trim());
    ok(&mut crane(&["delete", &named], true));
    refused(&mut crane(&["manifest", &image], false));
}

#[test]
fn oras_pushes_pulls_lists_referrers_and_deletes() {
    let Some([oras]) = tools::require(["oras"]) else { return };
    let dir = tempfile::tempdir().unwrap();
    let registry = RegistryDaemon::start(&dir.path().join("state"), &[]);
    let (source, copy) = (dir.path().join("source"), dir.path().join("copy"));
    let digest = layout(&source);
    let token = registry.token();
    let oras = |args: &[&str], token: &str| {
        let mut command = Command::new(&oras);
        command.args(args).env("ORAS_TOKEN", token);
        command
    };
    let image = format!("{}/team/app:1", registry.address);
    let from = source.display().to_string();
    refused(&mut oras(&["push", &from, "1", &image], ""));
    ok(&mut oras(&["push", &from, "1", &image], &token));
    ok(&mut oras(&["pull", &image, &copy.display().to_string()], ""));
    assert!(copy.join("blobs/sha256").join(digest.trim_start_matches("sha256:")).is_file());
    let named = format!("{}/team/app@{digest}", registry.address);
    assert_eq!(ok(&mut oras(&["tags", &named], "")).trim(), "1");
    assert_eq!(ok(&mut oras(&["refs", &named], "")).trim(), "");
    ok(&mut oras(&["rm", &named], &token));
    refused(&mut oras(&["pull", &image, &copy.display().to_string()], ""));
}

#[test]
fn epoch_serve_refuses_mysql_and_incomplete_s3_settings() {
    let dir = tempfile::tempdir().unwrap();
    let epoch = dir.path().join("epoch");
    std::os::unix::fs::symlink(CORACLE, &epoch).unwrap();
    let run = |args: &[&str]| {
        let mut command = Command::new(&epoch);
        command.args(args).arg("--state").arg(dir.path().join("state"));
        command
    };
    let mysql =
        refused(&mut run(&["serve", "--dsn", "epoch:epoch@tcp(127.0.0.1:3306)/epoch?parseTime=true"]));
    assert!(mysql.contains("MySQL is not supported"), "{mysql}");
    let s3 = refused(run(&["serve"]).env("EPOCH_S3_ENDPOINT", "s3.example").env("HOME", dir.path()));
    assert!(s3.contains("EPOCH_S3_BUCKET is not"), "{s3}");
}

/// Returns a snapshot's archive in the form that the original runtime exports.
fn archive() -> Vec<u8> {
    let mut out = tar::Builder::new(Vec::new());
    let config = br#"{"version":1,"config":{"id":"s1","name":"web","image":"ubuntu","cpu":2,"memory":1024}}"#;
    let memory = vec![7; 2_000_000];
    let map = r#"[{"o":0,"l":1000000},{"o":3000000,"l":1000000}]"#;
    for (name, bytes) in
        [("snapshot.json", config.as_slice()), ("config.json", b"{}"), ("memory-ranges", &memory)]
    {
        if name == "memory-ranges" {
            let records =
                [("COCOON.sparse.map", map.as_bytes()), ("COCOON.sparse.size", b"4000000".as_slice())];
            out.append_pax_extensions(records).unwrap();
        }
        let mut header = tar::Header::new_ustar();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o640);
        out.append_data(&mut header, name, bytes).unwrap();
    }
    out.into_inner().unwrap()
}

#[test]
fn epoch_moves_snapshots_and_disks_with_original_environment() {
    let dir = tempfile::tempdir().unwrap();
    let registry = RegistryDaemon::start(&dir.path().join("state"), &[]);
    let at = |name: &str| dir.path().join(name);
    std::os::unix::fs::symlink(CORACLE, at("epoch")).unwrap();
    // Stub of the original runtime: exports an archive, and keeps what it imports.
    let cocoon = "#!/bin/sh\ncase \"$2\" in export) cat \"$0.tar\" ;; import) cat > \"$0.$4\" ;; esac\n";
    std::fs::write(at("cocoon"), cocoon).unwrap();
    std::fs::set_permissions(at("cocoon"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::write(at("cocoon.tar"), archive()).unwrap();
    let epoch = |args: &[&str], token: &str| {
        let mut command = Command::new(at("epoch"));
        command.args(args).current_dir(dir.path()).env("EPOCH_SERVER", registry.url(""));
        command.env("EPOCH_REGISTRY_TOKEN", token).env("EPOCH_COCOON_BINARY", at("cocoon"));
        command
    };
    let token = registry.token();
    let denied = refused(&mut epoch(&["push", "vms/web"], "wrong"));
    assert!(denied.contains("COR-IMG-005"), "{denied}");
    for (tag, version) in [("plain", &[][..]), ("chunked", &["--chunked"][..])] {
        let name = format!("vms/web:{tag}");
        ok(epoch(&["push", &name], &token).args(version));
        ok(&mut epoch(&["pull", &name, "-f", "back.tar"], ""));
        ok(&mut epoch(&["pull", &name], ""));
        let (file, imported) =
            (std::fs::read(at("back.tar")).unwrap(), std::fs::read(at("cocoon.web")).unwrap());
        assert!(file == imported, "{tag}: the same archive, into a file or the runtime");
        let mut back = tar::Archive::new(file.as_slice());
        let names: Vec<_> =
            back.entries().unwrap().map(|e| e.unwrap().path().unwrap().display().to_string()).collect();
        assert_eq!(names, ["snapshot.json", "config.json", "memory-ranges"]);
        assert!(file.windows(17).any(|w| w == b"COCOON.sparse.map"), "{tag}: sparse as before");
        ok(&mut epoch(&["push", "vms/again", "-f", "back.tar"], &token));
    }
    assert_eq!(ok(&mut epoch(&["tag", "vms/web:plain", "latest"], &token)), "vms/web:latest\n");
    let listed = ok(&mut epoch(&["ls"], ""));
    assert!(listed.contains("vms/web") && listed.contains("snapshot"), "{listed}");
    let tags = ok(&mut epoch(&["ls", "vms/web"], ""));
    assert!(["plain", "chunked", "latest"].iter().all(|tag| tags.contains(tag)), "{tags}");
    let shown: serde_json::Value =
        serde_json::from_str(&ok(&mut epoch(&["inspect", "vms/web"], ""))).unwrap();
    assert_eq!((&shown["kind"], &shown["layerCount"]), (&"snapshot".into(), &2.into()));
    let raw: serde_json::Value = serde_json::from_str(&ok(&mut epoch(&["get", "vms/web"], ""))).unwrap();
    assert_eq!(raw["artifactType"], "application/vnd.cocoonstack.snapshot.v1+json");
    ok(&mut epoch(&["rm", "vms/web:plain"], &token));
    let gone = refused(&mut epoch(&["get", "vms/web:plain"], ""));
    assert!(gone.contains("COR-IMG-004"), "{gone}");
    ok(&mut epoch(&["rm", "vms/web:plain"], &token));
    let denied = refused(&mut epoch(&["rm", "vms/web:chunked"], "wrong"));
    assert!(denied.contains("COR-IMG-005"), "{denied}");

    std::fs::write(at("disk.raw"), vec![5; 3_000_000]).unwrap();
    ok(&mut epoch(&["push", "images/os", "-f", "disk.raw"], &token));
    ok(&mut epoch(&["pull", "images/os", "-f", "back.raw"], ""));
    assert!(std::fs::read(at("back.raw")).unwrap() == vec![5; 3_000_000]);
    let nowhere = refused(epoch(&["ls"], "").env("EPOCH_SERVER", "http://127.0.0.1:1"));
    assert!(nowhere.contains("EPOCH_SERVER"), "the advice names the setting: {nowhere}");
}

/// One chunk is as large as the original's layers. Data lies across the edges of chunks, where an error would lose it.
#[test]
fn disk_push_with_1_gib_chunks_roundtrips() {
    use std::os::unix::fs::{FileExt, MetadataExt};
    const GIB: u64 = 1 << 30;
    let dir = tempfile::tempdir().unwrap();
    let registry = RegistryDaemon::start(&dir.path().join("state"), &[]);
    let docker = login(&dir.path().join("docker"), &registry);
    let reference = format!("{}/disks/large:1", registry.address);
    let (disk, back) = (dir.path().join("disk.raw"), dir.path().join("back.raw"));
    let file = std::fs::File::create(&disk).unwrap();
    file.set_len(2 * GIB + 4096).unwrap();
    let data: Vec<u8> = (0u8..=250).cycle().take(2 << 20).collect();
    let places = [0, GIB - (1 << 20), 2 * GIB - (2 << 20)];
    places.iter().for_each(|at| file.write_all_at(&data, *at).unwrap());
    file.write_all_at(&data[..4096], 2 * GIB).unwrap();
    let coracle = |args: &[&str]| {
        let mut command = Command::new(CORACLE);
        let output = command.args(args).env("DOCKER_CONFIG", &docker).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{args:?}: {said}");
        said
    };
    let (from, to) = (disk.to_str().unwrap(), back.to_str().unwrap());
    let push = ["image", "push", &reference, "--disk", from, "--chunk-size", "1GiB", "--parallel", "1"];
    let said = coracle(&push);
    assert!(said.contains("in 3 of 3 chunks"), "{said}");
    let said = coracle(&push);
    assert!(said.contains("in 0 of 3 chunks"), "all of them are there: {said}");
    coracle(&["image", "pull", &reference, "--disk", to]);
    let pulled = std::fs::File::open(&back).unwrap();
    let about = pulled.metadata().unwrap();
    assert_eq!(about.len(), 2 * GIB + 4096);
    assert!(about.blocks() * 512 < 16 << 20, "what was a hole is one: {} blocks", about.blocks());
    let mut read = vec![0; data.len()];
    for at in places {
        pulled.read_exact_at(&mut read, at).unwrap();
        assert!(read == data, "the data at {at}");
    }
    pulled.read_exact_at(&mut read[..4096], 2 * GIB).unwrap();
    assert!(read[..4096] == data[..4096], "the last window");
}

/// Only `EPOCH_CA_CERT` names the authority of the registry's certificate.
#[test]
fn epoch_ca_cert_is_trusted() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    std::fs::write(at("cert.pem"), made.cert.pem()).unwrap();
    std::fs::write(at("key.pem"), made.signing_key.serialize_pem()).unwrap();
    let (cert, key) = (at("cert.pem").display().to_string(), at("key.pem").display().to_string());
    let registry = RegistryDaemon::start(&at("state"), &["--tls-cert", &cert, "--tls-key", &key]);
    std::os::unix::fs::symlink(CORACLE, at("epoch")).unwrap();
    std::fs::write(at("disk.raw"), vec![5; 300_000]).unwrap();
    let epoch = |args: &[&str]| {
        let mut command = Command::new(at("epoch"));
        command.args(args).current_dir(dir.path()).env("EPOCH_REGISTRY_TOKEN", registry.token());
        command.env("EPOCH_SERVER", format!("https://{}", registry.address));
        command
    };
    refused(&mut epoch(&["push", "images/os", "-f", "disk.raw"]));
    refused(&mut epoch(&["ls"]));
    ok(epoch(&["push", "images/os", "-f", "disk.raw"]).env("EPOCH_CA_CERT", &cert));
    ok(epoch(&["pull", "images/os", "-f", "back.raw"]).env("EPOCH_CA_CERT", &cert));
    assert!(std::fs::read(at("back.raw")).unwrap() == vec![5; 300_000]);
    let none = refused(epoch(&["ls"]).env("EPOCH_CA_CERT", &key));
    assert!(none.contains("there is none in it"), "{none}");
}
