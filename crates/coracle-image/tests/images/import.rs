//! Imports of archives and layouts that other tools write.

use coracle_image::{ImageError, Source};

use crate::common::{Bench, Layer, Parts, Stored, has_programs, progress, run};

fn parts() -> Parts {
    let low = Layer::new().file("low", "1").dir("d", 0o755).tar();
    let high = Layer::new().file("high", vec![5; 70_000]).tar();
    // No zstd here: the docker format does not support it, and skopeo refuses to convert.
    Parts::new(vec![
        Stored::gzip(&low),
        Stored::gzip(&high),
        Stored::plain(&Layer::new().file("top", "3").tar()),
    ])
}

#[tokio::test]
async fn import_of_skopeo_archive() {
    if !has_programs(&["skopeo"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let layout = dir.path().join("layout");
    parts().write(&layout, "t");
    let archive = dir.path().join("image.tar");
    run(
        "skopeo",
        &[
            "copy",
            &format!("oci:{}:t", layout.display()),
            &format!("docker-archive:{}:localhost/x/y:7", archive.display()),
        ],
    );
    let bench = Bench::new();
    let from_layout = bench.import(&parts()).await.unwrap();
    let image = bench.store.import(&Source::DockerArchive(archive.clone()), None, progress()).await.unwrap();
    assert_eq!(image.references, ["localhost/x/y:7".parse().unwrap()]);
    assert_eq!(image.chain_id, from_layout.chain_id);
    assert!(image.layers.iter().all(|l| l.digest == l.diff_id), "layers stay uncompressed");
    bench.store.rootfs(&image).await.unwrap();
    run("gzip", &[archive.to_str().unwrap()]);
    let zipped = Source::DockerArchive(dir.path().join("image.tar.gz"));
    assert_eq!(bench.store.import(&zipped, None, progress()).await.unwrap(), image, "compressed as a whole");
}

#[tokio::test]
async fn inconsistent_archive_leaves_no_file() {
    let good = Parts::new(vec![Stored::plain(&Layer::new().file("f", "x").tar())]);
    let layer = &good.layers[0].bytes;
    let other = Layer::new().file("f", "y").tar();
    let config = format!("{}.json", "c".repeat(64));
    let manifest =
        |layers: &str| format!(r#"[{{"Config":"{config}","RepoTags":["a:1"],"Layers":[{layers}]}}]"#);
    let archive = |manifest: &str, layer: &[u8]| {
        Layer::new()
            .file("l/layer.tar", layer)
            .file(&config, &good.config)
            .file("manifest.json", manifest)
            .tar()
    };
    let linked = Layer::new()
        .file("real/layer.tar", layer)
        .symlink("l/layer.tar", "../real/layer.tar")
        .file(&config, &good.config);
    let whole = manifest("\"l/layer.tar\"");
    for (why, bytes, code) in [
        ("good", archive(&whole, layer), ""),
        ("a linked layer, as old docker writes it", linked.file("manifest.json", &whole).tar(), ""),
        ("another layer", archive(&whole, &other), "COR-IMG-007"),
        ("layer missing", archive(&manifest("\"nowhere\""), layer), "COR-IMG-002"),
        ("too few layers", archive(&manifest(""), layer), "COR-IMG-008"),
        ("no manifest", Layer::new().file("l/layer.tar", layer).tar(), "COR-IMG-002"),
        ("no json", archive("nonsense", layer), "COR-IMG-002"),
        (
            "two images",
            archive(&format!("{},{}", &whole[..whole.len() - 1], &whole[1..]), layer),
            "COR-IMG-002",
        ),
        ("cut", archive(&whole, layer)[..1500].to_vec(), "COR-IMG-008"),
        ("empty", vec![], "COR-IMG-002"),
    ] {
        let bench = Bench::new();
        let file = bench.dir.path().join("a.tar");
        std::fs::write(&file, bytes).unwrap();
        let before = bench.listing();
        match bench.store.import(&Source::DockerArchive(file), None, progress()).await {
            Ok(image) => {
                assert!(code.is_empty() && image.layers[0].digest == good.layers[0].diff_id, "{why}")
            }
            Err(error) => {
                assert_eq!(error.code(), code, "{why}: {error}");
                assert_eq!(bench.listing(), before, "{why}: nothing is left");
            }
        }
    }
}

#[tokio::test]
async fn import_of_layout_by_tag() {
    let dir = tempfile::tempdir().unwrap();
    parts().write(dir.path(), "localhost/a/b:v1");
    let bench = Bench::new();
    let source = |tag: Option<&str>| Source::OciDir { dir: dir.path().into(), tag: tag.map(str::to_owned) };
    for tag in [None, Some("v1"), Some("localhost/a/b:v1")] {
        let image = bench.store.import(&source(tag), None, progress()).await.unwrap();
        assert_eq!(image.references, ["localhost/a/b:v1".parse().unwrap()]);
    }
    let missing = bench.store.import(&source(Some("v2")), None, progress()).await.unwrap_err();
    assert!(missing.to_string().contains("only: localhost/a/b:v1"), "{missing}");
    let nowhere = Source::OciDir { dir: "/nonexistent".into(), tag: None };
    assert!(matches!(
        bench.store.import(&nowhere, None, progress()).await,
        Err(ImageError::InvalidSource { .. })
    ));
    let registry = Source::Registry("x".parse().unwrap());
    assert!(matches!(
        bench.store.import(&registry, None, progress()).await,
        Err(ImageError::InvalidSource { .. })
    ));
}
