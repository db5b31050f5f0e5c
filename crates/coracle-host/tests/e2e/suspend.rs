//! Pause, hibernation and resume with real VMs.

use std::time::Duration;

use crate::support::{Node, assert_clock_between, counter, exec, last_number, now, vmms, wait_until_counted};
use coracle_testkit::{elapse, eventually, netns};
use coracle_types::VmState;

#[test]
fn guest_pauses_hibernates_and_resumes() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        let record = counter(&host, "web").await;
        wait_until_counted(&host, "web", 5).await;

        assert_eq!(host.pause("web", None).await.unwrap().state, VmState::Paused);
        // A paused guest causes no events; a running one would count ten times a second.
        let counts_nothing = eventually("a paused guest counts nothing", async || {
            let still = last_number(&host, "web").await; // earlier output may still be in flight
            elapse(Duration::from_millis(700)).await;
            (last_number(&host, "web").await == still).then_some(still)
        });
        let still = counts_nothing.await.unwrap();
        assert_eq!(host.pause("web", None).await.unwrap().state, VmState::Paused, "again");
        // A restarted daemon leaves the VM paused.
        host.shutdown().await;
        drop(host);
        let host = node.open().await;
        assert_eq!(host.get("web").unwrap().record.state, VmState::Paused);
        elapse(Duration::from_millis(500)).await;
        assert_eq!(last_number(&host, "web").await, still, "nor does the daemon's start wake it");
        assert_eq!(host.resume("web", None).await.unwrap().state, VmState::Running);
        wait_until_counted(&host, "web", still + 5).await;

        let asleep = host.hibernate("web", None).await.unwrap();
        assert_eq!((asleep.state, asleep.process), (VmState::Hibernated, None));
        assert_eq!(vmms(node.dir.path()), 0, "no VMM is left");
        let saved = asleep.saved.as_ref().expect("its memory is on disk").bytes;
        eprintln!("128 MiB of memory are {} MiB on disk", saved >> 20);
        assert!(saved < 128 << 20, "empty pages take no room");
        let still = last_number(&host, "web").await;
        host.shutdown().await;
        drop(host);
        let host = node.open().await;
        let awake = host.resume("web", None).await.unwrap();
        assert_eq!((awake.state, awake.address, awake.boots), (VmState::Running, record.address, 1));
        assert_eq!(awake.saved, None, "used up");
        wait_until_counted(&host, "web", still + 5).await;
        let before = now();
        assert_clock_between(before, &exec(&host, "web", &["date", "+%s"]).await.0);
        assert!(!node.state().join("vms").join(record.id.as_str()).join("saved").exists());
        host.delete("web", true, None).await.unwrap();
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

#[test]
fn incompatible_saved_memory_is_refused_and_kept() {
    netns::run_within(Duration::from_secs(240), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open_with(|config| config.templates.enabled = true).await;
        counter(&host, "first").await;
        host.hibernate("first", None).await.unwrap();
        host.delete("first", false, None).await.unwrap();
        let warm =
            host.warm_template(1.try_into().unwrap(), 128.try_into().unwrap(), "", None).await.unwrap();
        let clone = counter(&host, "clone").await;
        assert_eq!(clone.template, Some(warm.key), "clones sleep, too");
        wait_until_counted(&host, "clone", 3).await;
        host.pause("clone", None).await.unwrap();
        host.hibernate("clone", None).await.unwrap();
        let still = last_number(&host, "clone").await;
        let wrong = host.stop("clone", Duration::ZERO, None).await.unwrap_err();
        assert_eq!(wrong.code(), "COR-VM-005", "a stop would lose its memory: {}", wrong.chain());

        // As if another build of the VMM had saved the memory.
        let path = node.state().join("vms").join(clone.id.as_str()).join("record.json");
        let text = std::fs::read_to_string(&path).unwrap();
        let vmm = host.probes()[0].1.version.clone();
        host.shutdown().await;
        drop(host);
        std::fs::write(&path, text.replace(&format!("\"vmm\": \"{vmm}\""), "\"vmm\": \"6.0.0\"")).unwrap();
        let host = node.open().await;
        let refused = host.start("clone", None).await.unwrap_err();
        let words = refused.chain();
        assert!(words.contains("VMM version") && words.contains("6.0.0") && words.contains(&vmm), "{words}");
        let kept = host.get("clone").unwrap().record.clone();
        assert_eq!((kept.state, &kept.message), (VmState::Hibernated, &words), "nothing is lost");
        host.shutdown().await;
        drop(host);
        std::fs::write(&path, text).unwrap();
        let host = node.open().await;
        host.start("clone", None).await.unwrap();
        wait_until_counted(&host, "clone", still + 3).await;

        // A truncated file is refused, too.
        host.hibernate("clone", None).await.unwrap();
        let memory = path.with_file_name("saved").join("memory");
        std::fs::File::options().write(true).open(memory).unwrap().set_len(1 << 20).unwrap();
        let refused = host.start("clone", None).await.unwrap_err().chain();
        assert!(refused.contains("1048576 bytes instead of"), "{refused}");
        assert_eq!(vmms(node.dir.path()), 0);
        host.delete("clone", false, None).await.unwrap();
        assert_eq!(std::fs::read_dir(node.state().join("vms")).unwrap().count(), 0, "no file is left");
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}

#[test]
fn failed_memory_save_leaves_the_guest_running() {
    netns::run_within(Duration::from_secs(120), || async {
        let Some(node) = Node::new().await else { return };
        let host = node.open().await;
        let web = counter(&host, "web").await;
        wait_until_counted(&host, "web", 3).await;
        // The path of the memory file is occupied by a directory.
        let saved = node.state().join("vms").join(web.id.as_str()).join("saved");
        std::fs::create_dir_all(saved.join("memory.part")).unwrap();
        let refused = host.hibernate("web", None).await.unwrap_err().chain();
        assert!(refused.contains("reserve space for the memory"), "{refused}");
        std::fs::write(node.state().join("snapshots/.part-first"), "in the way").unwrap();
        let refused = host.save_snapshot("web", Some("first".parse().unwrap())).await.unwrap_err().chain();
        assert!(refused.contains("reserve space for the memory"), "{refused}");
        assert_eq!(host.get("web").unwrap().record.state, VmState::Running);
        let before = last_number(&host, "web").await;
        wait_until_counted(&host, "web", before + 10).await; // and nothing twice
        assert_eq!(exec(&host, "web", &["echo", "here"]).await.0, "here\n");
        host.delete("web", true, None).await.unwrap();
        host.network().teardown().await.unwrap();
        host.shutdown().await;
    });
}
