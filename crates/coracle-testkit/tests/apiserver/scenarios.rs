//! Scenarios of reading and writing objects.

use anyhow::ensure;
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use kube::{
    Api, ResourceExt as _,
    api::{
        DeleteParams, DynamicObject, EvictParams, ListParams, Patch, PatchParams, PostParams, Preconditions,
    },
    discovery::Discovery,
};
use serde_json::{Value, json};

use crate::{Corner, api_error, widget};

fn merge(patch: Value) -> Patch<Value> {
    Patch::Merge(patch)
}

fn apply(mut patch: Value) -> Patch<Value> {
    patch["apiVersion"] = json!("test.coracle.dev/v1");
    patch["kind"] = json!("Widget");
    patch["metadata"]["name"] = json!("a");
    Patch::Apply(patch)
}

fn field_manager(manager: &str) -> PatchParams {
    PatchParams::apply(manager)
}

pub(crate) async fn create_sets_identity_and_defaults(at: Corner) -> anyhow::Result<()> {
    let mut body =
        widget(json!({"generateName": "w-", "uid": "mine"}), json!({"colour": "red", "unknown": 1}));
    body.data["status"] = json!({"phase": "Done"});
    let made = at.widgets().create(&PostParams::default(), &body).await?;
    let name = made.name_any();
    ensure!(name.starts_with("w-") && name.len() == 7, "{name}");
    ensure!(made.uid().is_some_and(|uid| uid.len() == 36) && made.creation_timestamp().is_some());
    ensure!(made.resource_version().is_some() && made.metadata.generation == Some(1));
    ensure!(made.data["spec"] == json!({"colour": "red", "size": 1}), "{:?}", made.data);
    ensure!(made.data.get("status").is_none(), "the status is not part of a creation");
    let read = at.widgets().get(&name).await?;
    ensure!(read.metadata == made.metadata && read.data == made.data);
    Ok(())
}

pub(crate) async fn create_refuses_duplicates_and_unknown_namespaces(at: Corner) -> anyhow::Result<()> {
    at.widget("a", json!({})).await?;
    let (code, message) = api_error(at.widget("a", json!({})).await);
    ensure!(code == 409 && message.contains("already exists"), "{message}");
    let elsewhere = Corner { namespace: "no-such-namespace".into(), ..at.clone() };
    ensure!(api_error(elsewhere.widget("a", json!({})).await).0 == 404);
    ensure!(at.widgets().get_opt("b").await?.is_none());
    Ok(())
}

pub(crate) async fn replace_needs_the_latest_version(at: Corner) -> anyhow::Result<()> {
    let first = at.widget("a", json!({"size": 1})).await?;
    let put = async |object: &DynamicObject| at.widgets().replace("a", &PostParams::default(), object).await;
    let mut changed = first.clone();
    changed.data["spec"]["size"] = json!(2);
    let second = put(&changed).await?;
    ensure!(second.resource_version() != first.resource_version());
    let (code, message) = api_error(put(&changed).await);
    ensure!(code == 409 && message.contains("has been modified"), "{message}");
    ensure!(put(&second).await?.resource_version() == second.resource_version(), "no change, no new version");
    changed.metadata.resource_version = None;
    ensure!(api_error(put(&changed).await).0 == 422);
    changed.metadata = second.metadata.clone();
    changed.metadata.uid = Some("3f0c1f3e-0000-4000-a000-000000000000".into());
    let (code, message) = api_error(put(&changed).await);
    ensure!(code == 409 && message.contains("UID in precondition"), "{message}");
    Ok(())
}

pub(crate) async fn generation_counts_changes_of_the_spec(at: Corner) -> anyhow::Result<()> {
    at.widget("a", json!({})).await?;
    for (patch, want) in [
        (json!({"metadata": {"labels": {"a": "1"}}}), 1),
        (json!({"spec": {"size": 2}}), 2),
        (json!({"spec": {"size": 2}}), 2),
        (json!({"metadata": {"labels": null}, "spec": {"size": null}}), 3),
    ] {
        let patched = at.widgets().patch("a", &PatchParams::default(), &merge(patch.clone())).await?;
        ensure!(patched.metadata.generation == Some(want), "{patch}: {:?}", patched.metadata);
    }
    let read = at.widgets().get("a").await?;
    ensure!(read.data["spec"]["size"] == json!(1), "the default fills a removed field");
    ensure!(read.metadata.labels.is_none());
    Ok(())
}

pub(crate) async fn status_is_written_by_its_subresource(at: Corner) -> anyhow::Result<()> {
    at.widget("a", json!({"size": 3})).await?;
    let both = || merge(json!({"spec": {"size": 4}, "status": {"phase": "Done"}}));
    let main = at.widgets().patch("a", &PatchParams::default(), &both()).await?;
    ensure!(main.data.get("status").is_none() && main.data["spec"]["size"] == json!(4));
    at.widgets().patch("a", &PatchParams::default(), &merge(json!({"spec": {"size": 3}}))).await?;
    let status = at.widgets().patch_status("a", &PatchParams::default(), &both()).await?;
    ensure!(status.data["status"] == json!({"phase": "Done"}) && status.data["spec"]["size"] == json!(3));
    ensure!(status.metadata.generation == Some(3), "a status keeps the generation: {:?}", status.metadata);
    Ok(())
}

pub(crate) async fn merge_patch_honours_preconditions(at: Corner) -> anyhow::Result<()> {
    let first = at.widget("a", json!({})).await?;
    let patch = async |metadata: Value| {
        let patch = merge(json!({"metadata": metadata, "spec": {"colour": "blue"}}));
        at.widgets().patch("a", &PatchParams::default(), &patch).await
    };
    ensure!(api_error(patch(json!({"uid": "another"})).await).0 == 422);
    patch(json!({"uid": first.uid(), "resourceVersion": first.resource_version()})).await?;
    ensure!(
        api_error(patch(json!({"resourceVersion": first.resource_version(), "labels": {"x": "y"}})).await).0
            == 409
    );
    ensure!(api_error(at.widgets().patch("b", &PatchParams::default(), &merge(json!({}))).await).0 == 404);
    Ok(())
}

pub(crate) async fn apply_removes_what_it_no_longer_sets(at: Corner) -> anyhow::Result<()> {
    let set = async |manager: &str, labels: Value, tags: Value| {
        let patch = apply(json!({
            "metadata": {"labels": labels, "finalizers": tags}, "spec": {"labels": labels, "tags": tags},
        }));
        at.widgets().patch("a", &field_manager(manager), &patch).await
    };
    set("one", json!({"a": "1", "b": "1"}), json!(["test.dev/x"])).await?;
    let both = json!({"metadata": {"labels": {"b": "1"}, "finalizers": ["test.dev/y"]}, "spec": {"labels": {"b": "1"}}});
    at.widgets().patch("a", &field_manager("two"), &apply(both)).await?;
    let left = set("one", json!({"c": "1"}), json!(["test.dev/z"])).await?;
    let labels = json!({"b": "1", "c": "1"});
    ensure!(left.data["spec"]["labels"] == labels, "{:?}", left.data);
    ensure!(serde_json::to_value(left.labels())? == labels);
    ensure!(left.data["spec"]["tags"] == json!(["test.dev/z"]), "a list without a type is one value");
    let mut finalizers = left.finalizers().to_vec();
    finalizers.sort();
    ensure!(finalizers == ["test.dev/y", "test.dev/z"], "{finalizers:?}");
    let again = set("one", json!({"c": "1"}), json!(["test.dev/z"])).await?;
    ensure!(again.resource_version() == left.resource_version(), "nothing changed");
    Ok(())
}

pub(crate) async fn apply_takes_an_atomic_object_as_one_value(at: Corner) -> anyhow::Result<()> {
    let set = async |spec: Value| {
        at.widgets()
            .patch("a", &field_manager("one"), &apply(json!({"spec": spec})))
            .await
            .map(|set| set.data["spec"].clone())
    };
    let place = json!({"node": "n1", "rack": "r1"});
    ensure!(set(json!({"place": place, "labels": {"a": "1"}})).await?["place"] == place);
    let moved = json!({"node": "n2"});
    ensure!(set(json!({"place": moved, "labels": {"a": "1"}})).await?["place"] == moved);
    at.widgets().patch("a", &field_manager("two"), &apply(json!({"spec": {"labels": {"b": "1"}}}))).await?;
    let without = set(json!({"colour": "red"})).await?;
    ensure!(without.get("place").is_none(), "{without}");
    ensure!(without["labels"] == json!({"b": "1"}), "{without}");
    Ok(())
}

pub(crate) async fn apply_of_anothers_field_needs_force(at: Corner) -> anyhow::Result<()> {
    let colour = |colour: &str| apply(json!({"spec": {"colour": colour}}));
    at.widgets().patch("a", &field_manager("one"), &colour("red")).await?;
    at.widgets().patch("a", &field_manager("two"), &colour("red")).await?;
    ensure!(api_error(at.widgets().patch("a", &field_manager("two"), &colour("blue")).await).0 == 409);
    let forced = at.widgets().patch("a", &field_manager("two").force(), &colour("blue")).await?;
    ensure!(forced.data["spec"]["colour"] == json!("blue"));
    ensure!(api_error(at.widgets().patch("a", &field_manager("one"), &colour("red")).await).0 == 409);
    at.widgets().patch("a", &PatchParams::default(), &merge(json!({"spec": {"colour": "green"}}))).await?;
    ensure!(
        api_error(at.widgets().patch("a", &field_manager("two"), &colour("blue")).await).0 == 409,
        "an update takes the field"
    );
    Ok(())
}

pub(crate) async fn apply_with_a_uid_creates_nothing(at: Corner) -> anyhow::Result<()> {
    let with = |uid: Option<String>| apply(json!({"metadata": {"uid": uid, "finalizers": ["test.dev/x"]}}));
    let gone = with(Some("3f0c1f3e-0000-4000-a000-000000000000".into()));
    let (code, message) = api_error(at.widgets().patch("a", &field_manager("one").force(), &gone).await);
    ensure!(code == 409 && message.contains("uid mismatch"), "{message}");
    ensure!(at.widgets().get_opt("a").await?.is_none());
    let made = at.widget("a", json!({})).await?;
    ensure!(api_error(at.widgets().patch("a", &field_manager("one").force(), &gone).await).0 == 422);
    let held = at.widgets().patch("a", &field_manager("one").force(), &with(made.uid())).await?;
    ensure!(held.finalizers() == ["test.dev/x"]);
    let stale =
        apply(json!({"metadata": {"resourceVersion": made.resource_version()}, "status": {"phase": "x"}}));
    ensure!(api_error(at.widgets().patch_status("a", &field_manager("one").force(), &stale).await).0 == 409);
    ensure!(
        api_error(at.widgets().patch_status("b", &field_manager("one"), &apply(json!({"status": {}}))).await)
            .0
            == 404
    );
    Ok(())
}

pub(crate) async fn conditions_of_two_managers_are_merged(at: Corner) -> anyhow::Result<()> {
    at.widget("a", json!({})).await?;
    let say = async |manager: &str, kind: &str, status: &str| {
        let patch = apply(json!({"status": {"conditions": [{"type": kind, "status": status}]}}));
        at.widgets().patch_status("a", &field_manager(manager).force(), &patch).await
    };
    say("one", "Ready", "False").await?;
    say("two", "Available", "True").await?;
    let both = say("one", "Ready", "True").await?;
    let want = json!([{"type": "Ready", "status": "True"}, {"type": "Available", "status": "True"}]);
    ensure!(both.data["status"]["conditions"] == want, "{:?}", both.data);
    let other = say("one", "Synced", "True").await?;
    let want = json!([{"type": "Available", "status": "True"}, {"type": "Synced", "status": "True"}]);
    ensure!(other.data["status"]["conditions"] == want, "{:?}", other.data);
    Ok(())
}

pub(crate) async fn finalizer_delays_deletion(at: Corner) -> anyhow::Result<()> {
    let body = widget(json!({"name": "a", "finalizers": ["test.dev/x"]}), json!({}));
    at.widgets().create(&PostParams::default(), &body).await?;
    let marked = at.widgets().delete("a", &DeleteParams::default()).await?.left();
    ensure!(marked.is_some_and(|object| object.metadata.deletion_timestamp.is_some()));
    let read = at.widgets().get("a").await?;
    ensure!(read.metadata.generation == Some(2), "the mark is a new generation");
    at.widgets().delete("a", &DeleteParams::default()).await?;
    ensure!(at.widgets().get("a").await?.resource_version() == read.resource_version(), "marked once");
    let finalizers = |all: &[&str]| merge(json!({"metadata": {"finalizers": all}}));
    let more = finalizers(&["test.dev/x", "test.dev/y"]);
    ensure!(api_error(at.widgets().patch("a", &PatchParams::default(), &more).await).0 == 422);
    at.widgets().patch("a", &PatchParams::default(), &finalizers(&[])).await?;
    ensure!(at.widgets().get_opt("a").await?.is_none());
    Ok(())
}

pub(crate) async fn delete_honours_preconditions(at: Corner) -> anyhow::Result<()> {
    let made = at.widget("a", json!({})).await?;
    let only = |uid: Option<String>, resource_version| DeleteParams {
        preconditions: Some(Preconditions { uid, resource_version }),
        ..DeleteParams::default()
    };
    ensure!(api_error(at.widgets().delete("a", &only(Some("another".into()), None)).await).0 == 409);
    ensure!(api_error(at.widgets().delete("a", &only(None, Some("1".into()))).await).0 == 409);
    ensure!(at.widgets().delete("a", &only(made.uid(), made.resource_version())).await?.is_right());
    ensure!(api_error(at.widgets().delete("a", &DeleteParams::default()).await).0 == 404);
    Ok(())
}

pub(crate) async fn lists_select_and_page(at: Corner) -> anyhow::Result<()> {
    for n in 0..5 {
        let labels = json!({"name": format!("w{n}"), "labels": {"odd": (n % 2 == 1).to_string()}});
        at.widgets().create(&PostParams::default(), &widget(labels, json!({}))).await?;
    }
    let names = async |params: ListParams| {
        let list = at.widgets().list(&params).await?;
        let names: Vec<_> = list.items.iter().map(kube::ResourceExt::name_any).collect();
        anyhow::Ok((names.join(" "), list.metadata.continue_.unwrap_or_default()))
    };
    ensure!(names(ListParams::default().labels("odd=true")).await?.0 == "w1 w3");
    ensure!(names(ListParams::default().labels("odd in (false),odd!=true")).await?.0 == "w0 w2 w4");
    ensure!(names(ListParams::default().fields("metadata.name=w2")).await?.0 == "w2");
    let (mut token, mut pages) = (String::new(), Vec::new());
    loop {
        let mut page = ListParams::default().limit(2);
        if !token.is_empty() {
            page = page.continue_token(&token);
        }
        let (names, next) = names(page).await?;
        pages.push(names);
        if next.is_empty() {
            break;
        }
        token = next;
    }
    ensure!(pages == ["w0 w1", "w2 w3", "w4"], "{pages:?}");
    Ok(())
}

pub(crate) async fn metadata_is_read_alone(at: Corner) -> anyhow::Result<()> {
    let made = at.widget("a", json!({"colour": "red"})).await?;
    let found = at.widgets().get_metadata("a").await?;
    ensure!(found.metadata.uid == made.metadata.uid);
    ensure!(found.types.is_some_and(|types| types.kind == "PartialObjectMetadata"));
    ensure!(at.widgets().get_metadata_opt("b").await?.is_none());
    ensure!(at.widgets().list_metadata(&ListParams::default()).await?.items.len() == 1);
    Ok(())
}

pub(crate) async fn lease_is_taken_by_one_of_two(at: Corner) -> anyhow::Result<()> {
    let leases: Api<Lease> = Api::namespaced(at.client.clone(), &at.namespace);
    let lease = |holder: &str, version: Option<String>| -> Lease {
        serde_json::from_value(json!({
            "metadata": {"name": "group", "resourceVersion": version},
            "spec": {"holderIdentity": holder, "renewTime": "2026-01-01T00:00:00.000001Z", "leaseDurationSeconds": 15},
        }))
        .unwrap()
    };
    let free = leases.create(&PostParams::default(), &lease("", None)).await?;
    let version = free.resource_version();
    leases.replace("group", &PostParams::default(), &lease("one", version.clone())).await?;
    ensure!(
        api_error(leases.replace("group", &PostParams::default(), &lease("two", version)).await).0 == 409
    );
    let spec = leases.get("group").await?.spec.unwrap_or_default();
    ensure!(spec.holder_identity.as_deref() == Some("one"));
    Ok(())
}

fn pod(name: &str, node: Option<&str>) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {"nodeName": node, "containers": [{"name": "main", "image": "example.org/i:1"}]},
    }))
    .unwrap()
}

pub(crate) async fn pod_of_a_node_ends_with_its_grace(at: Corner) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(at.client.clone(), &at.namespace);
    let made = pods.create(&PostParams::default(), &pod("on", Some("n1"))).await?;
    ensure!(made.status.and_then(|s| s.phase).as_deref() == Some("Pending"));
    pods.delete("on", &DeleteParams::default().grace_period(5)).await?;
    let ending = pods.get("on").await?.metadata;
    ensure!(ending.deletion_timestamp.is_some() && ending.deletion_grace_period_seconds == Some(5));
    pods.delete("on", &DeleteParams::default().grace_period(0)).await?;
    ensure!(pods.get_opt("on").await?.is_none());
    pods.create(&PostParams::default(), &pod("off", None)).await?;
    pods.delete("off", &DeleteParams::default()).await?;
    ensure!(pods.get_opt("off").await?.is_none(), "no kubelet has it");
    Ok(())
}

pub(crate) async fn pod_is_evicted(at: Corner) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(at.client.clone(), &at.namespace);
    pods.create(&PostParams::default(), &pod("on", Some("n1"))).await?;
    pods.evict("on", &EvictParams::default()).await?;
    ensure!(pods.get("on").await?.metadata.deletion_timestamp.is_some());
    ensure!(api_error(pods.evict("absent", &EvictParams::default()).await).0 == 404);
    Ok(())
}

pub(crate) async fn discovery_names_served_kinds(at: Corner) -> anyhow::Result<()> {
    let found = Discovery::new(at.client.clone()).filter(&["test.coracle.dev"]).run().await?;
    let group = found.get("test.coracle.dev").ok_or_else(|| anyhow::anyhow!("the group is not served"))?;
    let resources = group.versioned_resources("v1");
    let (resource, capabilities) = resources.first().ok_or_else(|| anyhow::anyhow!("no kind is served"))?;
    ensure!((resource.kind.as_str(), resource.plural.as_str()) == ("Widget", "widgets"));
    ensure!(capabilities.subresources.iter().any(|(sub, _)| sub.plural == "status"));
    let none = Discovery::new(at.client.clone()).filter(&["absent.coracle.dev"]).run().await?;
    ensure!(none.get("absent.coracle.dev").is_none());
    Ok(())
}
