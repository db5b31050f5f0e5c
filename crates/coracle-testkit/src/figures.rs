//! Output and measurements of benchmarks: one line of JSON per measured value on stdout, memory from `/proc`, writes from the
//! metrics of the API server.

use std::fs;

use anyhow::Context as _;

/// Prints a measured value, such as `boot.raw_ms` of the benchmark `boot`.
pub fn figure(name: &str, value: f64, unit: &str) {
    print(name, &format!("{value:.3}"), unit, None);
}

/// Prints a value that could not be measured, and the reason.
pub fn no_figure(name: &str, why: &str, unit: &str) {
    print(name, "null", unit, Some(why));
}

#[expect(clippy::print_stdout, reason = "the result of a benchmark")]
fn print(name: &str, value: &str, unit: &str, why: Option<&str>) {
    let bench = name.split('.').next().unwrap_or(name);
    let why = why.map(|why| format!(",\"why\":{}", serde_json::Value::from(why))).unwrap_or_default();
    println!("{{\"bench\":\"{bench}\",\"figure\":\"{name}\",\"value\":{value},\"unit\":\"{unit}\"{why}}}");
}

/// The `p`-th percentile (0–100) by nearest rank: of 20 samples, p95 is the second largest.
///
/// # Panics
/// When there are no samples.
#[must_use]
pub fn percentile(samples: &[f64], p: usize) -> f64 {
    assert!(!samples.is_empty(), "no samples");
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * p).div_ceil(100).max(1);
    sorted[rank.min(sorted.len()) - 1]
}

/// Resident memory of a process in MiB: `VmRSS` of proc_pid_status(5).
///
/// # Errors
/// When the process is gone.
pub fn rss_mib(pid: u32) -> anyhow::Result<f64> {
    status_mib(pid, "VmRSS:")
}

/// Peak resident memory of a process in MiB: `VmHWM` of proc_pid_status(5).
///
/// # Errors
/// When the process is gone.
pub fn peak_rss_mib(pid: u32) -> anyhow::Result<f64> {
    status_mib(pid, "VmHWM:")
}

/// Private resident memory of a process in MiB: `Private_*` of proc_pid_smaps_rollup(5).
///
/// # Errors
/// When the process is gone.
pub fn private_mib(pid: u32) -> anyhow::Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let lines = text.lines().filter(|line| line.starts_with("Private_"));
    lines.map(kib).sum::<anyhow::Result<f64>>().map(|kib| kib / 1024.0)
}

/// CPU time of a process so far, user and system, in seconds (proc_pid_stat(5), fields 14 and 15).
///
/// # Errors
/// When the process is gone.
pub fn cpu_seconds(pid: u32) -> anyhow::Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let after_name = stat.rsplit_once(") ").context("stat without a name")?.1;
    let mut fields = after_name.split(' ').skip(11);
    let mut ticks = || fields.next().context("short stat")?.parse::<f64>().context("ticks");
    // USER_HZ is 100 on all supported architectures.
    Ok((ticks()? + ticks()?) / 100.0)
}

fn status_mib(pid: u32, field: &str) -> anyhow::Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find(|line| line.starts_with(field)).with_context(|| format!("no {field}"))?;
    Ok(kib(line)? / 1024.0)
}

fn kib(line: &str) -> anyhow::Result<f64> {
    line.split_whitespace().nth(1).context("no number")?.parse().context("kB")
}

/// Number of write requests that the API server has answered since it started, over all verbs that can change something.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Writes {
    /// Requests by `resource.group` (`pods.` for the core group), without Leases and Events.
    pub objects: std::collections::BTreeMap<String, f64>,
    /// Requests for Leases.
    pub leases: f64,
    /// Requests for Events.
    pub events: f64,
    /// Requests of any kind, including reads but not watches, which are long-lived.
    pub calls: f64,
}

impl Writes {
    /// Parses the text of the API server's `/metrics`, series `apiserver_request_total`.
    #[must_use]
    pub fn parse(metrics: &str) -> Self {
        let mut writes = Self::default();
        for line in metrics.lines().filter(|line| line.starts_with("apiserver_request_total{")) {
            let label = |name: &str| {
                let start = line.find(&format!("{name}=\""))? + name.len() + 2;
                line[start..].split('"').next()
            };
            let verb = label("verb").unwrap_or_default();
            if !["WATCH", "CONNECT"].contains(&verb) {
                let count = line.rsplit(' ').next().and_then(|n| n.parse::<f64>().ok());
                writes.calls += count.unwrap_or_default();
            }
            if !["POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION"].contains(&verb) {
                continue;
            }
            let count = line.rsplit(' ').next().and_then(|n| n.parse::<f64>().ok()).unwrap_or_default();
            match label("resource").unwrap_or_default() {
                "leases" => writes.leases += count,
                "events" => writes.events += count,
                // Reviews do not store an object.
                resource if resource.ends_with("reviews") => {}
                resource => {
                    let key = format!("{resource}.{}", label("group").unwrap_or_default());
                    *writes.objects.entry(key).or_default() += count;
                }
            }
        }
        writes
    }

    /// Difference to `before`, without resources that have not changed.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let grown = |(key, now): (&String, &f64)| {
            let more = now - before.objects.get(key).copied().unwrap_or_default();
            (more != 0.0).then(|| (key.clone(), more))
        };
        Self {
            objects: self.objects.iter().filter_map(grown).collect(),
            leases: self.leases - before.leases,
            events: self.events - before.events,
            calls: self.calls - before.calls,
        }
    }

    /// Writes to objects and their status, without Leases and Events.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.objects.values().sum()
    }
}

/// Counts the writes of the API server so far.
///
/// # Errors
/// When the API server does not answer.
#[cfg(feature = "cluster")]
pub async fn api_writes(client: &kube::Client) -> anyhow::Result<Writes> {
    let request = http::Request::get("/metrics").body(Vec::new())?;
    Ok(Writes::parse(&client.request_text(request).await?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_by_nearest_rank() {
        let samples: Vec<f64> = (1..=20).map(f64::from).collect();
        assert_eq!([50, 95, 100].map(|p| percentile(&samples, p)), [10.0, 19.0, 20.0]);
        assert_eq!(percentile(&[7.0], 95), 7.0);
    }

    #[test]
    fn writes_exclude_reads_leases_and_events() {
        let line = |verb: &str, group: &str, resource: &str, n: u32| {
            format!(
                "apiserver_request_total{{code=\"200\",group=\"{group}\",resource=\"{resource}\",verb=\"{verb}\"}} {n}\n"
            )
        };
        let before = line("PATCH", "vm.mikrom.es", "mikromvms", 2);
        let after = [
            line("PATCH", "vm.mikrom.es", "mikromvms", 3),
            line("POST", "vm.mikrom.es", "mikromvms", 1),
            line("GET", "vm.mikrom.es", "mikromvms", 50),
            line("PUT", "coordination.k8s.io", "leases", 9),
            line("POST", "events.k8s.io", "events", 4),
            line("POST", "authentication.k8s.io", "tokenreviews", 4),
        ]
        .concat();
        let grown = Writes::parse(&after).since(&Writes::parse(&before));
        assert_eq!((grown.total(), grown.leases, grown.events), (2.0, 9.0, 4.0));
    }

    #[test]
    fn own_memory_and_cpu_are_readable() {
        let pid = std::process::id();
        let now = rss_mib(pid).unwrap();
        assert!(now > 1.0 && peak_rss_mib(pid).is_ok_and(|peak| peak >= now));
        assert!(private_mib(pid).is_ok_and(|mib| mib > 0.1));
        assert!(cpu_seconds(pid).is_ok_and(|s| s >= 0.0));
    }
}
