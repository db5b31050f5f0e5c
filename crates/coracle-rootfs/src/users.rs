//! User of a process: resolves an OCI user string with the image's own `/etc/passwd` and `/etc/group`. Pure. The rules are
//! those of runc.

/// Maximum number of supplementary groups of a process.
const GROUPS_MAX: usize = 256;

/// Policy for the groups of a process beside those that its caller names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupsPolicy {
    /// Groups that /etc/group lists for the user; none if the user names a group.
    OfUser,
    /// The user's own group and the groups that /etc/group lists for the user.
    Merge,
    /// Only the user's own group.
    Strict,
}

/// Resolved user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessUser {
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Home directory, absolute.
    pub home: String,
}

/// Like [`resolve`], with the groups of `policy` and the groups `extra`.
///
/// # Errors
/// Same as [`resolve`].
pub fn resolve_with_groups(
    (user, policy, extra): (&str, GroupsPolicy, &[u32]),
    passwd: &str,
    group: &str,
) -> Result<ProcessUser, String> {
    let mut resolved = resolve(user, passwd, group)?;
    let member = |uid: u32| {
        let login = entries(passwd).find(|e| e.get(2).is_some_and(|f| f.parse() == Ok(uid)));
        login.map(|e| memberships(group, e.first().copied().unwrap_or(""))).unwrap_or_default()
    };
    let of_user = std::mem::take(&mut resolved.groups);
    let given = match policy {
        GroupsPolicy::OfUser => of_user,
        GroupsPolicy::Merge => [vec![resolved.gid], member(resolved.uid)].concat(),
        GroupsPolicy::Strict => vec![resolved.gid],
    };
    for group in given.into_iter().chain(extra.iter().copied()) {
        if !resolved.groups.contains(&group) && resolved.groups.len() < GROUPS_MAX {
            resolved.groups.push(group);
        }
    }
    Ok(resolved)
}

/// Resolves `""`, `"0"`, `"name"`, `"uid:gid"`, `"name:group"`. A number needs no entry; a name does.
///
/// # Errors
/// A sentence when the user or the group is unknown.
pub fn resolve(user: &str, passwd: &str, group: &str) -> Result<ProcessUser, String> {
    let (name, group_name) = match user.split_once(':') {
        Some((name, group)) => (name, Some(group).filter(|g| !g.is_empty())),
        None => (user, None),
    };
    let name = if name.is_empty() { "0" } else { name };
    let number = name.parse::<u32>().ok();
    let entry = entries(passwd).find(|e| match number {
        Some(uid) => e.get(2).is_some_and(|f| f.parse() == Ok(uid)),
        None => e.first() == Some(&name),
    });
    let field = |n: usize| entry.as_ref().and_then(|e| e.get(n)).copied();
    let Some(uid) = number.or_else(|| field(2)?.parse().ok()) else {
        return Err(format!("no user {name:?} in /etc/passwd"));
    };
    let login = field(0).unwrap_or("").to_owned();
    let home = field(5).filter(|h| h.starts_with('/')).unwrap_or("/").to_owned();
    let own_gid = field(3).and_then(|g| g.parse().ok()).unwrap_or(0);

    let Some(group_name) = group_name else {
        let groups = memberships(group, &login);
        return Ok(ProcessUser { uid, gid: own_gid, groups, home });
    };
    let gid = match group_name.parse() {
        Ok(gid) => gid,
        Err(_) => entries(group)
            .find(|e| e.first() == Some(&group_name))
            .and_then(|e| e.get(2)?.parse().ok())
            .ok_or_else(|| format!("no group {group_name:?} in /etc/group"))?,
    };
    Ok(ProcessUser { uid, gid, groups: Vec::new(), home })
}

/// Returns the groups that list `login` as a member.
fn memberships(group: &str, login: &str) -> Vec<u32> {
    let lists = |members: &&str| members.split(',').any(|m| m == login);
    entries(group)
        .filter(|e| !login.is_empty() && e.get(3).is_some_and(lists))
        .filter_map(|e| e.get(2)?.parse().ok())
        .take(GROUPS_MAX)
        .collect()
}

fn entries(text: &str) -> impl Iterator<Item = Vec<&str>> {
    text.lines().filter(|l| !l.is_empty() && !l.starts_with('#')).map(|l| l.splitn(8, ':').collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "# c\nroot:x:0:0:root:/root:/bin/sh\nweb:x:33:34:w:/srv:/bin/false\nbad\nodd:x:nine:9::/:\n";
    const GROUP: &str = "root:x:0:\nwww:x:34:\nlogs:x:40:web,root\nmail:x:41:postfix,web\nshort\n";

    #[test]
    fn user_table() {
        for (why, user, want) in [
            ("empty is root, with root's groups", "", Ok((0, 0, vec![40], "/root"))),
            ("number with an entry", "33", Ok((33, 34, vec![40, 41], "/srv"))),
            ("name", "web", Ok((33, 34, vec![40, 41], "/srv"))),
            ("number without an entry", "1000", Ok((1000, 0, vec![], "/"))),
            ("numbers need no files", "1000:1001", Ok((1000, 1001, vec![], "/"))),
            ("a given group ends membership", "web:logs", Ok((33, 40, vec![], "/srv"))),
            ("empty group", "web:", Ok((33, 34, vec![40, 41], "/srv"))),
            ("group alone", ":40", Ok((0, 40, vec![], "/root"))),
            ("unknown name", "mallory", Err("no user \"mallory\" in /etc/passwd")),
            ("unknown group", "web:nope", Err("no group \"nope\" in /etc/group")),
            ("entry without a number", "odd", Err("no user \"odd\" in /etc/passwd")),
            ("negative is a name", "-1", Err("no user \"-1\" in /etc/passwd")),
            ("too large is a name", "4294967296", Err("no user \"4294967296\" in /etc/passwd")),
        ] {
            let got = resolve(user, PASSWD, GROUP);
            let got = got
                .as_ref()
                .map(|i| (i.uid, i.gid, i.groups.clone(), i.home.as_str()))
                .map_err(String::as_str);
            assert_eq!(got, want, "{why}");
        }
    }

    #[test]
    fn policy_decides_about_groups_of_the_image() {
        use GroupsPolicy::{Merge, OfUser, Strict};
        for (why, user, policy, extra, want) in [
            ("as it was", "web", OfUser, &[][..], &[40, 41][..]),
            ("merged, also with a group of its own", "33:7", Merge, &[60, 7], &[7, 40, 41, 60]),
            ("strict", "33:7", Strict, &[60], &[7, 60]),
            ("strict, without a group of its own", "web", Strict, &[60], &[34, 60]),
            ("merged, the user's own group first", "web", Merge, &[], &[34, 40, 41]),
            ("a user without an entry", "1000", Merge, &[60], &[0, 60]),
        ] {
            let got = resolve_with_groups((user, policy, extra), PASSWD, GROUP).unwrap();
            assert_eq!(got.groups, want, "{why}");
        }
    }

    #[test]
    fn empty_user_is_root_without_passwd_and_group() {
        assert_eq!(resolve("", "", "").map(|i| (i.uid, i.home)), Ok((0, "/".to_owned())));
    }
}
