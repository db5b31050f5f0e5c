//! Scenarios of watches.

use std::{pin::pin, time::Duration};

use anyhow::{Context as _, ensure};
use coracle_testkit::{LIMIT, sim::Sim};
use futures_util::{StreamExt as _, TryStreamExt as _};
use kube::{
    ResourceExt as _,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, WatchEvent, WatchParams},
    runtime::watcher,
};
use serde_json::json;
use tokio::time::timeout;

use crate::{Corner, definition};

fn format_event(event: &WatchEvent<DynamicObject>) -> String {
    match event {
        WatchEvent::Added(object) => format!("+{}", object.name_any()),
        WatchEvent::Modified(object) => format!("~{}", object.name_any()),
        WatchEvent::Deleted(object) => format!("-{}", object.name_any()),
        WatchEvent::Bookmark(_) => "bookmark".into(),
        WatchEvent::Error(status) => format!("error {}", status.code),
    }
}

/// Next events of a watch from `version`, without bookmarks.
async fn events(
    at: &Corner,
    params: &WatchParams,
    version: &str,
    count: usize,
) -> anyhow::Result<Vec<String>> {
    let read = async {
        let mut stream = pin!(at.widgets().watch(params, version).await?);
        let mut all = Vec::new();
        while all.len() < count {
            let event = stream.try_next().await?.context("the watch ended")?;
            all.extend(Some(format_event(&event)).filter(|said| said != "bookmark"));
        }
        anyhow::Ok(all)
    };
    timeout(LIMIT, read).await.context("events do not come")?
}

async fn label(at: &Corner, name: &str, value: &str) -> anyhow::Result<()> {
    let patch = Patch::Merge(json!({"metadata": {"labels": {"on": value}}}));
    at.widgets().patch(name, &PatchParams::default(), &patch).await.map(drop)?;
    Ok(())
}

pub(crate) async fn watch_sees_changes_in_order(at: Corner) -> anyhow::Result<()> {
    at.widget("before", json!({})).await?;
    let list = at.widgets().list(&Default::default()).await?;
    let version = list.metadata.resource_version.unwrap_or_default();
    at.widget("a", json!({})).await?;
    label(&at, "a", "true").await?;
    at.widgets().delete("a", &DeleteParams::default()).await?;
    at.widget("b", json!({})).await?;
    let seen = events(&at, &WatchParams::default(), &version, 4).await?;
    ensure!(seen == ["+a", "~a", "-a", "+b"], "{seen:?}");
    let mut all = events(&at, &WatchParams::default(), "0", 2).await?;
    all.sort();
    ensure!(all == ["+b", "+before"], "from the beginning: {all:?}");
    Ok(())
}

pub(crate) async fn watch_with_selector_sees_objects_come_and_go(at: Corner) -> anyhow::Result<()> {
    at.widget("a", json!({})).await?;
    let list = at.widgets().list(&Default::default()).await?;
    let version = list.metadata.resource_version.unwrap_or_default();
    for value in ["true", "false", "true"] {
        label(&at, "a", value).await?;
    }
    let selected = WatchParams::default().labels("on=true");
    let seen = events(&at, &selected, &version, 3).await?;
    ensure!(seen == ["+a", "-a", "+a"], "{seen:?}");
    let named = WatchParams::default().fields("metadata.name=a");
    let seen = events(&at, &named, &version, 3).await?;
    ensure!(seen == ["~a", "~a", "~a"], "{seen:?}");
    Ok(())
}

pub(crate) async fn watcher_lists_and_follows(at: Corner) -> anyhow::Result<()> {
    for name in ["a", "b", "c"] {
        at.widget(name, json!({})).await?;
    }
    let mut stream = pin!(watcher(at.widgets(), watcher::Config::default().page_size(2)));
    let mut next = async || {
        timeout(LIMIT, stream.next()).await?.context("the watcher ended")?.map_err(anyhow::Error::from)
    };
    let mut listed = Vec::new();
    loop {
        match next().await? {
            watcher::Event::InitApply(object) => listed.push(object.name_any()),
            watcher::Event::InitDone => break,
            _ => {}
        }
    }
    listed.sort();
    ensure!(listed == ["a", "b", "c"], "{listed:?}");
    at.widgets().delete("b", &DeleteParams::default()).await?;
    ensure!(matches!(next().await?, watcher::Event::Delete(object) if object.name_any() == "b"));
    Ok(())
}

/// Tested with the API server in memory only: kube-apiserver compacts its history only after minutes.
#[test]
fn watch_from_a_compacted_revision_has_expired() {
    Sim::run(1, |sim| async move {
        sim.prepare(&[serde_json::from_value(definition())?], "test");
        let at = Corner { client: sim.client(), namespace: "test".into() };
        at.widget("a", json!({})).await?;
        let list = at.widgets().list(&Default::default()).await?;
        let version = list.metadata.resource_version.unwrap_or_default();
        at.widget("b", json!({})).await?;
        sim.api().compact();
        let expired = at.widgets().watch(&WatchParams::default(), &version).await;
        ensure!(matches!(expired.err(), Some(kube::Error::Api(status)) if status.code == 410));
        let stream = watcher(at.widgets(), watcher::Config::default());
        let mut first = pin!(
            stream.take_while(|event| std::future::ready(!matches!(event, Ok(watcher::Event::InitDone))))
        );
        let mut listed = 0;
        while let Some(event) = first.next().await {
            listed += usize::from(matches!(event?, watcher::Event::InitApply(_)));
        }
        ensure!(listed == 2);
        Ok(())
    });
}

#[test]
fn quiet_watch_sends_bookmarks_and_ends() {
    Sim::run(1, |sim| async move {
        sim.prepare(&[serde_json::from_value(definition())?], "test");
        let at = Corner { client: sim.client(), namespace: "test".into() };
        let began = tokio::time::Instant::now();
        let stream = at.widgets().watch(&WatchParams::default().timeout(150), "0").await?;
        let seen: Vec<_> = stream.map_ok(|event| format_event(&event)).try_collect().await?;
        ensure!(seen == ["bookmark", "bookmark"], "{seen:?}");
        ensure!(began.elapsed() >= Duration::from_secs(150));
        Ok(())
    });
}
