//! Specification: "Content Discovery".

use serde_json::{Value, json};

use crate::common::{INDEX, MANIFEST, digest, start};

fn names(body: &Value, field: &str) -> Vec<String> {
    body[field].as_array().unwrap().iter().map(|n| n.as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn tags_must_be_listed_in_order_without_regard_to_case() {
    let registry = start().await;
    let body = registry.manifest("a/b", json!({})).await;
    for tag in ["b", "C", "a", "A", "1", "_x"] {
        registry.put_manifest("a/b", tag, MANIFEST, &body).await;
    }
    let got = registry.get("/v2/a/b/tags/list").await;
    assert_eq!((got.status, got.header("link")), (200, None));
    assert_eq!(got.json()["name"], "a/b");
    assert_eq!(names(&got.json(), "tags"), ["1", "_x", "A", "a", "b", "C"]);
}

#[tokio::test]
async fn tags_of_an_unknown_repository_are_404() {
    let registry = start().await;
    let got = registry.get("/v2/nothing/here/tags/list").await;
    assert_eq!((got.status, got.code().as_str()), (404, "NAME_UNKNOWN"));
}

#[tokio::test]
async fn tags_must_be_no_more_than_n_and_name_the_next_page() {
    let registry = start().await;
    let body = registry.manifest("a", json!({})).await;
    for n in 0..5 {
        registry.put_manifest("a", &format!("t{n}"), MANIFEST, &body).await;
    }
    let (mut path, mut seen) = ("/v2/a/tags/list?n=2".to_owned(), Vec::new());
    for _ in 0..3 {
        let got = registry.get(&path).await;
        let page = names(&got.json(), "tags");
        assert!(page.len() <= 2);
        seen.extend(page);
        let Some(link) = got.header("link") else { break };
        let (target, relation) = link.split_once("; ").unwrap();
        assert_eq!(relation, "rel=\"next\"");
        path = target.trim_matches(['<', '>']).to_owned();
    }
    assert_eq!(seen, ["t0", "t1", "t2", "t3", "t4"]);
    let all = registry.get("/v2/a/tags/list?n=5").await;
    assert_eq!((all.json()["tags"].as_array().unwrap().len(), all.header("link")), (5, None));
}

#[tokio::test]
async fn tags_with_n_0_must_be_empty_and_without_link() {
    let registry = start().await;
    registry.image("a", "t").await;
    let got = registry.get("/v2/a/tags/list?n=0").await;
    assert_eq!(
        (got.status, got.json()["tags"].as_array().unwrap().len(), got.header("link")),
        (200, 0, None)
    );
}

#[tokio::test]
async fn tags_must_begin_behind_last() {
    let registry = start().await;
    let body = registry.manifest("a", json!({})).await;
    for tag in ["a", "B", "c"] {
        registry.put_manifest("a", tag, MANIFEST, &body).await;
    }
    for (last, want) in [("a", vec!["B", "c"]), ("B", vec!["c"]), ("bb", vec!["c"]), ("z", vec![])] {
        assert_eq!(
            names(&registry.get(&format!("/v2/a/tags/list?last={last}")).await.json(), "tags"),
            want,
            "{last}"
        );
    }
    let refused = registry.get("/v2/a/tags/list?n=x").await;
    assert_eq!((refused.status, refused.code().as_str()), (400, "PAGINATION_NUMBER_INVALID"));
}

#[tokio::test]
async fn catalog_lists_repositories() {
    let registry = start().await;
    assert_eq!(names(&registry.get("/v2/_catalog").await.json(), "repositories"), [""; 0]);
    for repo in ["b", "a/x", "a"] {
        registry.image(repo, "t").await;
    }
    registry.push("only-a-blob", b"x").await;
    assert_eq!(names(&registry.get("/v2/_catalog").await.json(), "repositories"), ["a", "a/x", "b"]);
    let page = registry.get("/v2/_catalog?n=2").await;
    assert_eq!(names(&page.json(), "repositories"), ["a", "a/x"]);
    assert_eq!(page.header("link"), Some("</v2/_catalog?n=2&last=a%2Fx>; rel=\"next\""));
    assert_eq!(names(&registry.get("/v2/_catalog?n=2&last=a%2Fx").await.json(), "repositories"), ["b"]);
}

#[tokio::test]
async fn referrers_must_be_an_empty_index_when_there_are_none() {
    let registry = start().await;
    for repo in ["a", "unknown"] {
        let got = registry.get(&format!("/v2/{repo}/referrers/{}", digest(b"unknown"))).await;
        assert_eq!((got.status, got.header("content-type")), (200, Some(INDEX)));
        assert_eq!(got.json(), json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": []}));
    }
    assert_eq!(registry.get("/v2/a/referrers/sha256:12").await.code(), "DIGEST_INVALID");
}

#[tokio::test]
async fn referrers_must_describe_each_manifest_with_the_subject() {
    let registry = start().await;
    let (subject, body) = registry.image("a", "base").await;
    let about = json!({"mediaType": MANIFEST, "digest": subject, "size": body.len()});
    let signed = json!({"subject": about, "artifactType": "application/x.sig", "annotations": {"by": "me"}});
    let (signature, _) = registry.image_with("a", "", signed).await;
    let (plain, _) = registry.image_with("a", "", json!({"subject": about})).await;
    registry.image_with("b", "", json!({"subject": about})).await;
    let got = registry.get(&format!("/v2/a/referrers/{subject}")).await;
    assert_eq!(
        (got.status, got.header("content-type"), got.header("oci-filters-applied")),
        (200, Some(INDEX), None)
    );
    let listed = got.json()["manifests"].as_array().unwrap().clone();
    assert_eq!(listed.len(), 2, "those of the same repository");
    let find = |d: &str| listed.iter().find(|m| m["digest"] == d).unwrap();
    assert_eq!(find(&signature)["artifactType"], "application/x.sig");
    assert_eq!(find(&signature)["annotations"], json!({"by": "me"}), "copied from the manifest");
    assert_eq!(find(&signature)["mediaType"], MANIFEST);
    assert_eq!(
        find(&plain)["artifactType"],
        "application/vnd.oci.image.config.v1+json",
        "the configuration's, where it has none"
    );
}

#[tokio::test]
async fn referrers_filter_must_be_said_when_it_was_applied() {
    let registry = start().await;
    let (subject, body) = registry.image("a", "base").await;
    let about = json!({"mediaType": MANIFEST, "digest": subject, "size": body.len()});
    for kind in ["application/x.one", "application/x.two"] {
        registry.image_with("a", "", json!({"subject": about, "artifactType": kind})).await;
    }
    let got = registry.get(&format!("/v2/a/referrers/{subject}?artifactType=application%2Fx.two")).await;
    assert_eq!(got.header("oci-filters-applied"), Some("artifactType"));
    let listed = got.json()["manifests"].as_array().unwrap().clone();
    assert_eq!((listed.len(), &listed[0]["artifactType"]), (1, &json!("application/x.two")));
}

#[tokio::test]
async fn referrers_must_show_an_index_too() {
    let registry = start().await;
    let subject = digest(b"base");
    let about = json!({"mediaType": MANIFEST, "digest": subject, "size": 4});
    let body = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [], "subject": about, "artifactType": "application/x.set"});
    let body = serde_json::to_vec(&body).unwrap();
    let put = registry.put_manifest("a", &digest(&body), INDEX, &body).await;
    assert_eq!((put.status, put.header("oci-subject")), (201, Some(subject.as_str())));
    let got = registry.get(&format!("/v2/a/referrers/{subject}")).await.json();
    assert_eq!(
        (&got["manifests"][0]["mediaType"], &got["manifests"][0]["artifactType"]),
        (&json!(INDEX), &json!("application/x.set"))
    );
}

#[tokio::test]
async fn referrers_come_in_pages_that_clients_can_hold() {
    let registry = start().await;
    let subject = digest(b"base");
    for n in 0..5 {
        let note = "x".repeat(1 << 20);
        let extra = json!({"subject": {"mediaType": MANIFEST, "digest": subject, "size": 4}, "annotations": {"n": n.to_string(), "note": note}});
        registry.image_with("a", "", extra).await;
    }
    let (mut path, mut seen) = (format!("/v2/a/referrers/{subject}"), 0);
    loop {
        let got = registry.get(&path).await;
        assert!(got.body.len() < 4 << 20, "{} bytes", got.body.len());
        seen += got.json()["manifests"].as_array().unwrap().len();
        let Some(link) = got.header("link") else { break };
        path = link.split('>').next().unwrap().trim_start_matches('<').to_owned();
    }
    assert_eq!(seen, 5);
}

#[tokio::test]
async fn referrers_pages_keep_the_filter() {
    let registry = start().await;
    let subject = digest(b"base");
    for n in 0..8 {
        let extra = json!({
            "subject": {"mediaType": MANIFEST, "digest": subject, "size": 4},
            "artifactType": if n % 2 == 0 { "application/x.even" } else { "application/x.odd" },
            "annotations": {"n": n.to_string(), "note": "x".repeat(1 << 20)},
        });
        registry.image_with("a", "", extra).await;
    }
    let (mut path, mut seen) =
        (format!("/v2/a/referrers/{subject}?artifactType=application/x.even"), Vec::new());
    for _ in 0..4 {
        let got = registry.get(&path).await;
        let body = got.json();
        let listed = body["manifests"].as_array().unwrap();
        seen.extend(listed.iter().map(|m| (m["artifactType"].clone(), m["digest"].clone())));
        let Some(link) = got.header("link") else { break };
        path = link.split('>').next().unwrap().trim_start_matches('<').to_owned();
    }
    seen.dedup();
    assert_eq!(seen.len(), 4);
    assert!(seen.iter().all(|(kind, _)| kind == "application/x.even"));
}

/// Lists are public, so they contain a bounded number of bytes per manifest.
#[tokio::test]
async fn referrer_with_huge_annotations_is_listed_without() {
    let registry = start().await;
    let subject = digest(b"base");
    let about = json!({"mediaType": MANIFEST, "digest": subject, "size": 4});
    let extra = json!({"subject": about, "annotations": {"note": "x".repeat(5 << 20)}});
    let (named, body) = registry.image_with("a", "", extra).await;
    let got = registry.get(&format!("/v2/a/referrers/{subject}")).await.json();
    assert_eq!(
        (&got["manifests"][0]["digest"], &got["manifests"][0]["annotations"]),
        (&json!(named), &json!(null))
    );
    assert_eq!(registry.get(&format!("/v2/a/manifests/{named}")).await.body, body, "the manifest has them");
    let long = json!({"artifactType": format!("application/{}", "x".repeat(2000))});
    let body = registry.manifest("a", long).await;
    assert_eq!(registry.put_manifest("a", "v", MANIFEST, &body).await.code(), "MANIFEST_INVALID");
}
