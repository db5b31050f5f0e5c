//! Images that are on the node already. Pulls need a registry and are tested on real nodes.

use coracle_proto::cri::*;
use tonic::Code;

use crate::support::{IMAGE, Node, container, sandbox};

#[tokio::test(flavor = "multi_thread")]
async fn image_status_knows_all_kinds_of_references() {
    let node = Node::new().await;
    node.import("localhost/test/latest", "").await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let image = kubelet.image_status(IMAGE).await.unwrap();
    assert_eq!((image.repo_tags.as_slice(), image.size > 0), (&[IMAGE.to_owned()][..], true));
    let digest = image.repo_digests[0].clone();
    let tag_and_digest = digest.replace('@', ":1@");
    for text in [image.id.as_str(), digest.as_str(), tag_and_digest.as_str()] {
        assert_eq!(kubelet.image_status(text).await.as_ref(), Some(&image), "{text}");
    }
    let latest = kubelet.image_status("localhost/test/latest").await.unwrap();
    assert_eq!(latest.repo_tags, ["localhost/test/latest:latest"]);
    assert_eq!(kubelet.image_status("localhost/test/none:1").await, None, "an unknown one succeeds");
    let filter = |image: &str| {
        let image = Some(ImageSpec { image: image.into(), ..ImageSpec::default() });
        ListImagesRequest { filter: Some(ImageFilter { image }) }
    };
    let listed = kubelet.images.list_images(filter(IMAGE)).await.unwrap().into_inner().images;
    assert_eq!(listed, [image]);
    assert_eq!(kubelet.image_list().await.len(), 2);
    let empty = ImageStatusRequest::default();
    assert_eq!(kubelet.images.image_status(empty).await.unwrap_err().code(), Code::InvalidArgument);
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn image_status_distinguishes_uids_from_user_names() {
    let node = Node::new().await;
    for (name, user) in
        [("uid", "1002"), ("name", "www-data"), ("uid-group", "1003:group"), ("name-group", "www-data:group")]
    {
        node.import(&format!("localhost/test/{name}:1"), user).await;
    }
    let mut daemon = node.open().await;
    let uid = |value| Some(Int64Value { value });
    for (name, want) in [
        ("uid", (uid(1002), "")),
        ("name", (None, "www-data")),
        ("uid-group", (uid(1003), "")),
        ("name-group", (None, "www-data")),
        ("empty", (uid(0), "")),
    ] {
        let image = daemon.kubelet.image_status(&format!("localhost/test/{name}:1")).await.unwrap();
        assert_eq!((image.uid, image.username.as_str()), want, "{name}");
    }
    daemon.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_image_is_gone_at_once_with_all_of_its_tags() {
    let node = Node::new().await;
    let mut daemon = node.open().await;
    let kubelet = &mut daemon.kubelet;
    let image = daemon.host.images().get(&IMAGE.parse().unwrap()).await.unwrap().unwrap();
    for name in ["localhost/test/empty:2", "localhost/other/empty:1"] {
        daemon.host.images().tag(&image.digest, &name.parse().unwrap()).await.unwrap();
    }
    let status = kubelet.image_status(IMAGE).await.unwrap();
    assert_eq!(status.repo_tags.len(), 3);
    let id = kubelet.run_sandbox(sandbox("web")).await.unwrap();
    let main = kubelet.create(&id, container("main", &status.id, &[]), sandbox("web")).await.unwrap();
    assert_eq!(kubelet.status(&main).await.unwrap().image_id, status.id, "the id alone is enough");

    let (mut one, mut two) = (kubelet.clone(), kubelet.clone());
    let (first, second) = tokio::join!(one.remove_image(IMAGE), two.remove_image(&status.id));
    assert!(first.is_ok() && second.is_ok(), "simultaneous removals succeed");
    assert!(kubelet.image_list().await.is_empty());
    for text in [IMAGE, "localhost/other/empty:1", status.id.as_str()] {
        assert_eq!(kubelet.image_status(text).await, None, "{text}");
    }
    kubelet.start(&main).await.expect("its container keeps what it needs");
    let info = kubelet.images.image_fs_info(ImageFsInfoRequest {}).await.unwrap().into_inner();
    let usage = &info.image_filesystems[0];
    assert!(std::path::Path::new(&usage.fs_id.as_ref().unwrap().mountpoint).is_dir());
    assert!(usage.timestamp > 0 && usage.used_bytes.is_some() && usage.inodes_used.is_some());
    daemon.end().await;
}
