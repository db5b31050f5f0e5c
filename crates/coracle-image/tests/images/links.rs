//! Layers that write through symbolic links of lower layers, compared with the result of umoci.

use std::path::Path;

use crate::common::{Bench, Layer, Parts, Stored, Tree, extract, has_programs, read_tree, run};

/// Tree as umoci unpacks it.
fn unpacked_by_umoci(layers: &[Vec<u8>], dir: &Path) -> Tree {
    let parts = Parts::new(layers.iter().map(|tar| Stored::gzip(tar)).collect());
    let (layout, bundle) = (dir.join("layout"), dir.join("bundle"));
    parts.write(&layout, "t");
    run("umoci", &["unpack", "--image", &format!("{}:t", layout.display()), bundle.to_str().unwrap()]);
    read_tree(&bundle.join("rootfs"))
}

/// Debian's layout after the `/usr` merge.
fn base() -> Layer {
    Layer::new().dir("usr", 0o755).dir("usr/bin", 0o755).file("usr/bin/sh", "shell").symlink("bin", "usr/bin")
}

/// Our tree and umoci's, without the attributes of the root itself.
async fn unpack_with_both(layers: Vec<Vec<u8>>) -> Option<(Tree, Tree)> {
    if !has_programs(&["fsck.erofs", "umoci"]) {
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut theirs = unpacked_by_umoci(&layers, dir.path());
    let bench = Bench::new();
    let rootfs = bench.rootfs(layers).await.unwrap();
    let mut ours = read_tree(&extract(&rootfs).path().join("root"));
    for tree in [&mut ours, &mut theirs] {
        tree.remove("");
    }
    Some((ours, theirs))
}

#[tokio::test]
async fn members_below_a_lower_link_follow_it() {
    for (why, layers) in [
        ("a file", vec![base(), Layer::new().file("bin/tool", "tool")]),
        ("a file that replaces", vec![base(), Layer::new().file("bin/sh", "other shell")]),
        ("a directory below", vec![base(), Layer::new().dir("bin/d", 0o700).file("bin/d/f", "x")]),
        ("a whiteout", vec![base(), Layer::new().whiteout("bin/.wh.sh")]),
        ("two layers", vec![base(), Layer::new().file("bin/a", "a"), Layer::new().file("bin/b", "b")]),
        (
            "a layer between that adds",
            vec![base(), Layer::new().file("usr/bin/a", "a"), Layer::new().file("bin/b", "b")],
        ),
        (
            "an absolute link",
            vec![
                Layer::new().dir("usr", 0o755).dir("usr/lib", 0o755).symlink("lib", "/usr/lib"),
                Layer::new().file("lib/so", "so"),
            ],
        ),
        ("a link to a link", vec![base().symlink("sbin", "bin"), Layer::new().file("sbin/tool", "tool")]),
        (
            "a link with dots",
            vec![
                Layer::new().dir("a", 0o755).dir("a/b", 0o755).dir("c", 0o755).symlink("a/b/l", "../../c/./"),
                Layer::new().file("a/b/l/f", "x"),
            ],
        ),
        (
            "a link over more than the root has",
            vec![Layer::new().dir("c", 0o755).symlink("l", "../../../c"), Layer::new().file("l/f", "x")],
        ),
        (
            "a link from a layer between",
            vec![
                Layer::new().dir("usr", 0o755).dir("usr/bin", 0o755).file("usr/bin/sh", "shell"),
                Layer::new().symlink("bin", "usr/bin"),
                Layer::new().file("bin/tool", "tool"),
            ],
        ),
    ] {
        let Some((ours, theirs)) = unpack_with_both(layers.into_iter().map(Layer::tar).collect()).await
        else {
            return;
        };
        assert_eq!(ours, theirs, "{why}");
    }
}

/// A directory with an entry of its own replaces the link, in every unpacker.
#[tokio::test]
async fn directory_with_an_entry_replaces_a_lower_link() {
    let layers = vec![base().tar(), Layer::new().dir("bin", 0o755).file("bin/tool", "tool").tar()];
    let Some((ours, _)) = unpack_with_both(layers).await else { return };
    let names: Vec<_> = ours.keys().map(String::as_str).collect();
    assert_eq!(names, ["bin", "bin/tool", "usr", "usr/bin", "usr/bin/sh"]);
}

#[tokio::test]
async fn link_loop_is_refused() {
    let circle = Layer::new().symlink("a", "b").symlink("b", "a");
    let built = Bench::new().rootfs(vec![circle.tar(), Layer::new().file("a/f", "x").tar()]).await;
    let error = built.unwrap_err();
    assert!(error.to_string().contains("too many"), "{error}");
}

/// The link is replaced in the same way as a file at the path of a directory.
#[tokio::test]
async fn link_to_a_file_is_replaced_by_the_directory() {
    if !has_programs(&["fsck.erofs"]) {
        return;
    }
    let lower = Layer::new().file("f", "file").symlink("l", "f");
    let bench = Bench::new();
    let rootfs = bench.rootfs(vec![lower.tar(), Layer::new().file("l/x", "x").tar()]).await.unwrap();
    let tree = read_tree(&extract(&rootfs).path().join("root"));
    assert!(tree.contains_key("l/x") && tree["f"].starts_with("file"), "{tree:?}");
}
