//! Tests of the rules for ISO images.

use coracle_api::agentpool::IsoStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::*;

#[test]
fn redacted_url_contains_no_token() {
    for (url, want) in [
        ("https://h/images/1?api_key=secret&version=4.18", "https://h/images/1"),
        ("https://u:secret@h:8443/a/b.iso#secret", "https://h:8443/a/b.iso"),
        ("http://h?image_token=secret", "http://h"),
    ] {
        assert_eq!(redact_url(url), want);
    }
}

#[test]
fn check_interval_is_parsed_as_a_go_duration() {
    for (text, want) in [
        ("10m", Some(600)),
        ("1h30m", Some(5400)),
        ("90s", Some(90)),
        ("0s", None),
        ("", None),
        ("soon", None),
        ("5", None),
    ] {
        assert_eq!(go_duration(text).map(|d| d.as_secs()), want, "{text}");
    }
}

#[test]
fn iso_is_due_when_old_changed_or_lost() {
    let now: Timestamp = "2026-06-01T10:00:00Z".parse().unwrap();
    let url = "http://h/image";
    let mut pool = VsphereAgentPool::default();
    (pool.metadata.namespace, pool.metadata.name) = (Some("ns".into()), Some("p".into()));
    assert_eq!(due(&pool, url, now, false), Due::Refresh, "there is none");
    let iso = IsoStatus {
        path: "agent-forge/ns/p/1.iso".into(),
        sha256: "0".into(),
        url_hash: hash(url),
        checked_at: Some(Time(now)),
        ..IsoStatus::default()
    };
    pool.status.get_or_insert_default().iso = Some(iso);
    let later = now + interval(None);
    for (what, url, now, is_lost, want) in [
        ("fresh", url, now, false, Due::No),
        ("lost", url, now, true, Due::Check),
        ("old", url, later, false, Due::Check),
        ("old and lost", url, later, true, Due::Check),
        ("of another URL", "http://h/other", now, true, Due::Refresh),
    ] {
        assert_eq!(due(&pool, url, now, is_lost), want, "{what}");
    }
    pool.annotations_mut().insert(names::FORCE_ISO_REFRESH.into(), "1".into());
    assert_eq!(due(&pool, url, now, false), Due::Refresh, "asked for by hand");
}

#[test]
fn attached_or_current_iso_is_not_pruned() {
    let v = |p: &str| IsoVersion { path: p.into(), ..IsoVersion::default() };
    let history = [v("p/3.iso"), v("p/2.iso"), v("p/1.iso"), v("p/0.iso")];
    let held = HashSet::from(["[ds] p/1.iso".to_owned()]);
    assert_eq!(surplus(&history, "p/3.iso", 2, &held), ["p/0.iso"]);
    assert_eq!(surplus(&history, "p/0.iso", 2, &HashSet::new()), ["p/1.iso"], "the current one stays");
}

#[test]
fn partial_upload_is_removed_only_when_stale() {
    let file = |name: &str, modified: &str| File { name: name.into(), size: 1, modified: modified.into() };
    let files = [
        file(".old.partial", "2026-06-01T08:59:00Z"),
        file(".young.partial", "2026-06-01T09:30:00Z"),
        file(".unknown.partial", ""),
    ];
    assert_eq!(stale(&files, "2026-06-01T10:00:00Z".parse().unwrap()), [".old.partial"]);
}

#[test]
fn path_prefix_cannot_escape_the_datastore() {
    let mut pool = VsphereAgentPool::default();
    (pool.metadata.namespace, pool.metadata.name) = (Some("ns".into()), Some("p".into()));
    for (given, want) in
        [("", "agent-forge/ns/p"), ("a//b/./c", "a/b/c"), ("a/../../x", "x"), ("..", "agent-forge/ns/p")]
    {
        pool.spec.iso = Some(IsoSpec { path_prefix: given.into(), ..IsoSpec::default() });
        assert_eq!(prefix(&pool), want, "{given}");
    }
}
