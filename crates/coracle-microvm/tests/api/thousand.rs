use crate::world::{Operator, World, eventually};
use coracle_testkit::cluster;
use std::time::{Duration, Instant};
fn rss() -> u64 {
    std::fs::read_to_string("/proc/self/status")
        .unwrap()
        .lines()
        .find(|l| l.starts_with("VmRSS"))
        .unwrap()
        .split_whitespace()
        .nth(1)
        .unwrap()
        .parse()
        .unwrap()
}
#[test]
fn thousand() {
    cluster::run_within(Duration::from_secs(400), |cluster| async move {
        let w = World::new(cluster).await?;
        let base = rss();
        let t = Instant::now();
        for n in 0..1000 {
            w.create(&format!("vm-{n}"), w.spec()).await?;
        }
        println!("created in {:?}, rss before operator {} KiB", t.elapsed(), rss());
        let before = rss();
        let t = Instant::now();
        let policy = coracle_microvm::Policy::default();
        let _operator = Operator::start(w.client.clone(), coracle_microvm::Config { policy, ..w.config() });
        eventually("all", async || {
            tokio::time::sleep(Duration::from_millis(500)).await;
            (w.agent.count("StartVM") >= 1000).then_some(())
        })
        .await
        .ok();
        println!("started {} in {:?}", w.agent.count("StartVM"), t.elapsed());
        for _ in 0..60 {
            if w.agent.count("StartVM") >= 1000 {
                break;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        println!("started {} in {:?}, peak rss {}", w.agent.count("StartVM"), t.elapsed(), rss());
        tokio::time::sleep(Duration::from_secs(40)).await;
        println!("base {base} before {before} after {} KiB, gets {}", rss(), w.agent.count("GetVM"));
        Ok::<_, anyhow::Error>(())
    });
}
